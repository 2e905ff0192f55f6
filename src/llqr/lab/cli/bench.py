"""`llqr bench`: time refreshes, epochs and steps, and measure their memory."""

import importlib.metadata
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from llqr import Runtime
from llqr.lab import machine
from llqr.lab.bench import cadence, host, memory, peers, refresh, scaling
from llqr.lab.bench.refresh import RefreshSettings
from llqr.lab.bench.timing import BURST
from llqr.lab.bench.workload import Network, PassOptions, Setup
from llqr.lab.cli import options
from llqr.lab.cli.options import PLAIN, with_options
from llqr.lab.cli.terminal import show
from llqr.lab.config.layers import merge, parse_override, parse_value
from llqr.lab.config.strict import make
from llqr.lab.errors import ConfigurationError
from llqr.lab.names import check_known
from llqr.lab.passes import Precision
from llqr.lab.results.measurements import without_places
from llqr.lab.runs.json_files import write_json
from llqr.lab.runs.provenance import made_now
from llqr.lab.writing import check_file

HELP = """Time steps and refreshes, and measure their memory.

Medians and quartiles over repeats that take turns, after a warm-up, by CUDA events on a GPU. Images are random.
"""
bench_app = typer.Typer(help=HELP, no_args_is_help=True, **PLAIN)
app = typer.Typer(**PLAIN)
app.add_typer(bench_app, name="bench")

PRECISIONS = ("fp32", "tf32", "bf16")
REFERENCES = {"float32": torch.float32, "float64": torch.float64, "none": None}
SMALL = ("resnet18:width=16", "vit-ti:image_size=32,patch=8,depth=4")
"""Networks for a CPU."""
SIZES = ("vit-ti", "vit-s", "vit-b", "vit-l")


@dataclass(frozen=True)
class Target:
    """What is measured, and on which device."""

    model: Annotated[
        list[str] | None,
        typer.Option(help="A network, repeatable: vit-b, or with options resnet18:width=16,classes=10."),
    ] = None
    batch: Annotated[int, typer.Option(min=1, help="Images per batch.")] = 64
    precision: Annotated[
        str | None, typer.Option(help="bf16, tf32 or fp32 (default: bf16 on a CUDA device, else fp32).")
    ] = None
    device: options.Device = "auto"

    def setup(self, *on_cuda: str, on_cpu: Sequence[str] = SMALL) -> Setup:
        """The networks asked for, or those given for the kind of device."""
        chosen = machine.choose_device(self.device)
        cuda = chosen.type == "cuda"
        name = self.precision or ("bf16" if cuda else "fp32")
        check_known("--precision", name, PRECISIONS)
        networks = [Network.parse(text) for text in self.model or (on_cuda if cuda else on_cpu)]
        return Setup(networks, self.batch, Precision(name, chosen))


@dataclass(frozen=True)
class Output:
    """Where the numbers go."""

    out: Annotated[Path | None, typer.Option(help="File for the numbers, as JSON.", dir_okay=False)] = None
    quiet: options.Quiet = False

    def write(self, bench: ModuleType, setup: Setup, rows: Iterable[dict[str, Any]], **config: Any) -> None:
        """Measure, record and print; ``config`` is what was asked for besides the setup.

        The file has every row, with command, commit and machine. It is rewritten after each row, so that an interrupted
        command leaves what it has; ``complete`` says whether all are there.
        """
        head: dict[str, Any] = {"bench": bench.__name__.rpartition(".")[2]}
        if self.out is not None:
            check_file("--out", self.out)
            head |= made_now(machine.describe(setup.precision.device))
            head |= {"command": without_places(head["command"]), "config": setup.to_dict() | config}
        console = Console(stderr=True, quiet=self.quiet, highlight=False, soft_wrap=True)
        found: list[dict[str, Any]] = []
        try:
            for row in rows:  # a command takes minutes
                found.append(row)
                if self.out is not None:
                    write_json(self.out, head | {"rows": found, "complete": False})
                console.print(*(value for value in row.values() if isinstance(value, str) and value))
        except ValueError as error:  # the library refuses a setting, and names it
            raise ConfigurationError(str(error)) from error
        if self.out is not None:
            fitted = scaling.conclusion(found) if bench is scaling else {}
            write_json(self.out, head | {"rows": found, "complete": True} | fitted)
        show(bench.as_table(found))


@dataclass(frozen=True)
class Learning:
    """How a metric is learned."""

    structure: Annotated[str, typer.Option(help="Structure of U; refresh and memory take several: a,b.")] = "e-kfac"
    engine: Annotated[str, typer.Option(help="What multiplies by H; refresh takes several: a,b.")] = "auto"
    product_every: Annotated[
        str, typer.Option(help="Inner steps between products with H; refresh takes several: 1,3.")
    ] = "1"
    attention: Annotated[
        str, typer.Option(help="In a refresh: fused, as the network has it, or unfused, with every derivative.")
    ] = "fused"
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the traced product (engine linearised).")] = False
    apply_dtype: Annotated[str | None, typer.Option(help="In what U g is computed, such as bfloat16.")] = None
    max_side: Annotated[int, typer.Option(help="Longest side of a factor.")] = Runtime.max_side
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any other setting of llqr.Inner and llqr.Runtime, such as inner.steps=20."),
    ] = None

    def settings(self, **inner: Any) -> RefreshSettings:
        """The settings of one refresh."""
        runtime = {"engine": self.engine, "compile": self.compiled, "max_side": self.max_side}
        runtime |= {} if self.apply_dtype is None else {"apply_dtype": self.apply_dtype}
        inner |= {"product_every": parse_value(self.product_every)}
        table = {"structure": self.structure, "attention": self.attention, "runtime": runtime, "inner": inner}
        for override in self.overrides or ():
            merge(table, parse_override(override))
        return make(RefreshSettings, table, "", "command line")

    def each(self, **inner: Any) -> list[RefreshSettings]:
        """The settings for every combination of what was listed with commas."""
        lists = (text.split(",") for text in (self.structure, self.engine, self.product_every))
        chosen = (dict(zip(("structure", "engine", "product_every"), one, strict=True)) for one in product(*lists))
        return [replace(self, **one).settings(**inner) for one in chosen]  # type: ignore[arg-type]


Capture = Annotated[bool, typer.Option(help="On a CUDA device: capture refreshes as CUDA graphs.")]
Repeats = Annotated[int, typer.Option(min=1, help="Timed repeats.")]
TARGET, OUTPUT, REFRESH, TWO = Target(), Output(), Learning(), Learning(structure="diagonal,e-kfac")


def capturing(settings: RefreshSettings, setup: Setup, wanted: bool) -> RefreshSettings:
    """The settings with refreshes captured where wanted and possible."""
    capture = wanted and setup.on_cuda and settings.runtime.micro_batch is None
    return replace(settings, runtime=replace(settings.runtime, capture=capture))


@bench_app.command("refresh")
@with_options
def refresh_command(
    target: Target = TARGET,
    learned: Learning = REFRESH,
    capture: Capture = True,
    reference: Annotated[
        str, typer.Option(help="Errors are relative to exact products in float32 or float64; none leaves them out.")
    ] = "float32",
    repeats: Repeats = 3,
    output: Output = OUTPUT,
) -> None:
    """Time a refresh by engine and structure, the first one separately, and measure its error."""
    setup = target.setup("vit-b", "vit-l")
    check_known("--reference", reference, REFERENCES)
    ways = [capturing(settings, setup, capture) for settings in learned.each()]
    passes = PassOptions(capture=any(way.runtime.capture for way in ways))
    rows = refresh.measure(setup, ways, passes, repeats, REFERENCES[reference])
    output.write(refresh, setup, rows, geometry=[asdict(way) for way in ways], repeats=repeats, reference=reference)


@bench_app.command("cadence")
@with_options
def cadence_command(
    target: Target = TARGET,
    learned: Learning = REFRESH,
    capture: Capture = True,
    capture_passes: Annotated[bool, typer.Option(help="On a CUDA device: capture passes as CUDA graphs.")] = True,
    compile_passes: Annotated[bool, typer.Option(help="Compile the passes of a step.")] = False,
    epoch_steps: Annotated[int, typer.Option(min=1, help="Steps per epoch.")] = cadence.EPOCH_STEPS,
    probe_every: Annotated[
        int | None, typer.Option(min=2, help="Also a probe in one step of this many, from the same times.")
    ] = None,
    repeats: Repeats = 10,
    refresh_repeats: Annotated[int, typer.Option(min=1, help="Timed refreshes.")] = 3,
    output: Output = OUTPUT,
) -> None:
    """The paper's table of epoch times by method and refresh interval, from measured steps and refreshes."""
    setup = target.setup("vit-b", "vit-l", on_cpu=("vit-b", "vit-l"))
    geometry = capturing(learned.settings(), setup, capture)
    passes = PassOptions(capture_passes and setup.on_cuda, compile_passes)
    numbers = {"repeats": repeats, "refresh_repeats": refresh_repeats, "epoch_steps": epoch_steps}
    numbers |= {} if probe_every is None else {"probe_every": probe_every}
    rows = cadence.measure(setup, geometry, passes, **numbers)
    described = {"geometry": asdict(geometry), "passes": asdict(passes), "burst": BURST}
    output.write(cadence, setup, rows, **described, **numbers)


@bench_app.command("scaling")
@with_options
def scaling_command(
    target: Target = TARGET,
    learned: Learning = REFRESH,
    capture: Capture = True,
    repeats: Repeats = 3,
    output: Output = OUTPUT,
) -> None:
    """Time a refresh of ViT-Ti, S, B and L, and fit the power of the number of parameters with which it grows."""
    setup = target.setup(*SIZES, on_cpu=SIZES)
    geometry = capturing(learned.settings(), setup, capture)
    rows = scaling.measure(setup, geometry, repeats)
    output.write(scaling, setup, rows, geometry=asdict(geometry), repeats=repeats)


@bench_app.command("memory")
@with_options
def memory_command(target: Target = TARGET, learned: Learning = TWO, output: Output = OUTPUT) -> None:
    """Measure the most bytes that a step and a refresh hold, by method and structure. Needs a CUDA device."""
    setup = target.setup("resnet18", "vit-b")
    geometry = learned.each(steps=memory.STEPS)
    output.write(memory, setup, memory.measure(setup, geometry), geometry=[asdict(one) for one in geometry])


@bench_app.command("peers")
@with_options
def peers_command(target: Target = TARGET, repeats: Repeats = 40, output: Output = OUTPUT) -> None:
    """Time our SAM and F-SAM steps and those of pytorch_optimizer."""
    peers.peer()
    version = importlib.metadata.version("pytorch-optimizer")
    setup = target.setup("resnet18", "vit-b")
    output.write(peers, setup, peers.measure(setup, repeats), repeats=repeats, pytorch_optimizer=version)


@bench_app.command("host")
@with_options
def host_command(repeats: Repeats = 20, output: Output = OUTPUT) -> None:
    """Time steps and refreshes of a small MLP on one CPU core, where Python weighs as much as arithmetic."""
    peers.peer()
    torch.set_num_threads(1)
    setup = Setup([host.NETWORK], 64, Precision("fp32", torch.device("cpu")))
    output.write(host, setup, host.measure(setup, repeats), repeats=repeats, burst=BURST)

"""`llqr bench`: how long steps and refreshes take, how much memory they hold, and how both compare."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from llqr.lab import machine
from llqr.lab.bench import cadence, memory, peers, refresh, scaling, solvers, step
from llqr.lab.bench.errors import DTYPES
from llqr.lab.bench.record import Record
from llqr.lab.bench.refreshing import Refreshing
from llqr.lab.bench.tables import Table
from llqr.lab.bench.workload import Network, Passes
from llqr.lab.cli import options
from llqr.lab.cli.terminal import show
from llqr.lab.config.strict import ConfigurationError
from llqr.lab.training.precision import Precision

HELP = """Time steps and refreshes, and count their memory.

Medians and quartiles over repeats that take turns, after a warm-up, by CUDA events on a GPU. Images are random.
"""
bench_app = typer.Typer(
    help=HELP, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False
)

SMALL = ("resnet18:width=16", "vit-ti:image_size=32,patch=8,depth=4")
CAPTURED_SOLVERS = ("heavy-ball", "adam")
"""Those whose steps are replayed unless asked otherwise."""
PRECISIONS = ("fp32", "tf32", "bf16")

Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model", help="A network, any number of times: vit-b, ViT-B/16, or with options resnet18:width=16,classes=10."
    ),
]
Batch = Annotated[int, typer.Option(min=1, help="Images in a batch.")]
Structure = Annotated[str, typer.Option(help="Structure of U.")]
Structures = Annotated[str, typer.Option("--structure", help="Structures of U, separated by commas.")]
PrecisionName = Annotated[
    str | None, typer.Option("--precision", help="bf16, tf32 or fp32 (default: bf16 on a CUDA device, else fp32).")
]
Engine = Annotated[str, typer.Option(help="What multiplies by H, as in llqr.Geometry.")]
Engines = Annotated[str, typer.Option("--engine", help="What multiplies by H, separated by commas.")]
Attention = Annotated[str, typer.Option(help="In a refresh: fused, or unfused, which has every derivative.")]
Steps = Annotated[int, typer.Option(min=1, help="Inner steps of a refresh.")]
Products = Annotated[int, typer.Option("--products", min=1, help="Products with H to go up to.")]
ProductEvery = Annotated[int, typer.Option(min=1, help="Inner steps to a product with H, as in llqr.Geometry.")]
Solver = Annotated[str, typer.Option(help="The inner solver, as in llqr.Geometry.")]
Apply = Annotated[str, typer.Option(help="What U g is computed in: fp32 or bf16.")]
MicroBatch = Annotated[int | None, typer.Option(min=1, help="Compute a refresh in pieces of so many images.")]
Capture = Annotated[
    bool | None,
    typer.Option("--capture/--no-capture", help="Replay refreshes as CUDA graphs (default: on a CUDA device)."),
]
CapturePasses = Annotated[
    bool | None,
    typer.Option(
        "--capture-passes/--no-capture-passes", help="Replay passes as CUDA graphs (default: on a CUDA device)."
    ),
]
Compile = Annotated[
    bool,
    typer.Option("--compile/--no-compile", help="Compile what can be of a refresh, as in llqr.Geometry."),
]
Repeats = Annotated[int, typer.Option(min=1, help="Timed repeats.")]
RefreshRepeats = Annotated[int, typer.Option(min=1, help="Timed refreshes.")]
Out = Annotated[Path | None, typer.Option(help="File for the numbers, as JSON.", dir_okay=False)]


@dataclass(frozen=True)
class Ground:
    """What every command stands on."""

    networks: list[Network]
    batch: int
    precision: Precision

    @property
    def on_cuda(self) -> bool:
        return self.precision.device.type == "cuda"

    def recorded(self, option: str, wanted: bool | None, possible: bool = True) -> bool:
        """Whether to use CUDA graphs: as asked, otherwise wherever they are to be had."""
        if wanted and not self.on_cuda:
            raise ConfigurationError(f"{option} needs a CUDA device, got {self.precision.device}.")
        return self.on_cuda and possible if wanted is None else wanted

    def captures_refresh(self, wanted: bool | None, solver: str, micro_batch: int | None) -> bool:
        return self.recorded("--capture", wanted, solver in CAPTURED_SOLVERS and micro_batch is None)

    def config(self, **settings: Any) -> dict[str, Any]:
        plain = {
            key: asdict(value) if isinstance(value, Refreshing | Passes) else value for key, value in settings.items()
        }
        shared = {"batch": self.batch, "precision": self.precision.name}
        return {"models": [network.label for network in self.networks]} | shared | plain


def _ground(
    models: list[str] | None,
    batch: int,
    precision: str | None,
    device: str,
    on_cuda: Sequence[str],
    on_cpu: Sequence[str] = SMALL,
) -> Ground:
    chosen = machine.choose_device(device)
    cuda = chosen.type == "cuda"
    name = precision or ("bf16" if cuda else "fp32")
    if name not in PRECISIONS:
        raise ConfigurationError(f"--precision must be one of {', '.join(PRECISIONS)}, got {name!r}.")
    networks = [Network.parse(text) for text in models or (on_cuda if cuda else on_cpu)]
    return Ground(networks, batch, Precision(name, chosen))


@bench_app.command("step")
def step_command(
    model: Models = None,
    batch: Batch = 64,
    structure: Structure = "e-kfac",
    precision: PrecisionName = None,
    engine: Engine = "auto",
    attention: Attention = "fused",
    apply: Apply = "fp32",
    capture: Annotated[
        bool | None,
        typer.Option("--capture/--no-capture", help="Also with passes as CUDA graphs (default: on a CUDA device)."),
    ] = None,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Also with compiled passes.")] = False,
    repeats: Repeats = 10,
    device: options.Device = "auto",
    out: Out = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Time a step of SGD, AdamW, SAM, F-SAM, LLQR and LLQR+SAM, beside that of SGD."""
    ground = _ground(model, batch, precision, device, ("resnet18", "vit-b"))
    captures = (False, True) if ground.recorded("--capture", capture) else (False,)
    forms = [Passes(recorded, form) for form in ((False, True) if compiled else (False,)) for recorded in captures]
    # U acts in a step whatever it has learned: one product is enough.
    refreshing = Refreshing(structure, engine, attention, steps=1, apply=apply)
    config = ground.config(passes=list(map(str, forms)), refreshing=refreshing, repeats=repeats, burst=step.BURST)
    record = Record("step", config, ground.precision.device, out)
    rows = step.measure(ground.networks, forms, batch, ground.precision, refreshing, repeats)
    _leave(record, rows, step.as_table, as_json=as_json, quiet=quiet)


@bench_app.command("refresh")
def refresh_command(
    model: Models = None,
    batch: Batch = 64,
    structure: Structures = "e-kfac",
    precision: PrecisionName = None,
    engine: Engines = "auto",
    attention: Attention = "fused",
    steps: Steps = 50,
    product_every: Annotated[
        str, typer.Option(help="Inner steps to a product with H, as in llqr.Geometry, separated by commas.")
    ] = "1",
    solver: Solver = "heavy-ball",
    apply: Apply = "fp32",
    micro_batch: MicroBatch = None,
    capture: Capture = None,
    compiled: Compile = False,
    reference: Annotated[
        str, typer.Option(help="Errors are against exact products in float32 or float64; none leaves them out.")
    ] = "float32",
    repeats: Repeats = 3,
    device: options.Device = "auto",
    out: Out = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Time a refresh by engine and structure: the first one apart, what it goes to, and its error."""
    ground = _ground(model, batch, precision, device, ("vit-b", "vit-l"))
    if reference not in (*DTYPES, "none"):
        raise ConfigurationError(f"--reference must be one of {', '.join(DTYPES)} or none, got {reference!r}.")
    recorded = ground.captures_refresh(capture, solver, micro_batch)
    refreshing = Refreshing(
        attention=attention,
        steps=steps,
        solver=solver,
        apply=apply,
        micro_batch=micro_batch,
        capture=recorded,
        compile=compiled,
    )
    structures, engines = _listed("--structure", structure), _listed("--engine", engine)
    every = _counts("--product-every", product_every)
    config = ground.config(
        structures=structures,
        engines=engines,
        product_every=every,
        refreshing=refreshing,
        repeats=repeats,
        reference=reference,
    )
    record = Record("refresh", config, ground.precision.device, out)
    rows = refresh.measure(
        ground.networks,
        structures,
        engines,
        every,
        batch,
        ground.precision,
        refreshing,
        Passes(capture=recorded),
        repeats,
        None if reference == "none" else reference,
    )
    _leave(record, rows, refresh.as_table, as_json=as_json, quiet=quiet)


@bench_app.command("cadence")
def cadence_command(
    model: Models = None,
    batch: Batch = 64,
    structure: Structure = "e-kfac",
    precision: PrecisionName = None,
    engine: Engine = "auto",
    attention: Attention = "fused",
    steps: Steps = 50,
    product_every: ProductEvery = 1,
    solver: Solver = "heavy-ball",
    apply: Apply = "fp32",
    micro_batch: MicroBatch = None,
    capture: Capture = None,
    compiled: Compile = False,
    capture_passes: CapturePasses = None,
    compile_passes: Annotated[
        bool, typer.Option("--compile-passes/--no-compile-passes", help="Compile the passes of a step.")
    ] = False,
    epoch_steps: Annotated[int, typer.Option(min=1, help="Steps of an epoch.")] = cadence.EPOCH_STEPS,
    repeats: Repeats = 10,
    refresh_repeats: RefreshRepeats = 3,
    device: options.Device = "auto",
    out: Out = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """The paper's table of epoch times by method and refresh interval, from measured steps and refreshes."""
    ground = _ground(model, batch, precision, device, ("vit-b", "vit-l"), ("vit-b", "vit-l"))
    refreshing = Refreshing(
        structure,
        engine,
        attention,
        steps,
        solver,
        apply,
        micro_batch,
        capture=ground.captures_refresh(capture, solver, micro_batch),
        compile=compiled,
        product_every=product_every,
    )
    passes = Passes(ground.recorded("--capture-passes", capture_passes), compile_passes)
    numbers = {"repeats": repeats, "refresh_repeats": refresh_repeats, "epoch_steps": epoch_steps}
    config = ground.config(refreshing=refreshing, passes=passes, burst=step.BURST, **numbers)
    record = Record("cadence", config, ground.precision.device, out)
    rows = cadence.measure(ground.networks, batch, ground.precision, refreshing, passes, **numbers)
    _leave(record, rows, cadence.as_table, as_json=as_json, quiet=quiet)


@bench_app.command("scaling")
def scaling_command(
    model: Models = None,
    batch: Batch = 64,
    structure: Structure = "e-kfac",
    precision: PrecisionName = None,
    engine: Engine = "auto",
    attention: Attention = "fused",
    steps: Steps = 50,
    product_every: ProductEvery = 1,
    solver: Solver = "heavy-ball",
    micro_batch: MicroBatch = None,
    capture: Capture = None,
    compiled: Compile = False,
    repeats: Repeats = 3,
    device: options.Device = "auto",
    out: Out = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Time a refresh of ViT-Ti, S, B and L, and fit the power of the number of parameters it grows with."""
    sizes = ("vit-ti", "vit-s", "vit-b", "vit-l")
    ground = _ground(model, batch, precision, device, sizes, sizes)
    refreshing = Refreshing(
        structure,
        engine,
        attention,
        steps,
        solver,
        micro_batch=micro_batch,
        capture=ground.captures_refresh(capture, solver, micro_batch),
        compile=compiled,
        product_every=product_every,
    )
    record = Record("scaling", ground.config(refreshing=refreshing, repeats=repeats), ground.precision.device, out)
    record.collect(_told(scaling.measure(ground.networks, batch, ground.precision, refreshing, repeats), quiet))
    record.conclude(**scaling.conclusion(record.rows))
    _print(record, scaling.as_table(record.rows), as_json=as_json)


@bench_app.command("memory")
def memory_command(
    model: Models = None,
    batch: Batch = 64,
    structure: Structures = "diagonal,e-kfac",
    precision: PrecisionName = None,
    engine: Engine = "auto",
    attention: Attention = "fused",
    steps: Steps = memory.STEPS,
    product_every: ProductEvery = 1,
    solver: Solver = "heavy-ball",
    apply: Apply = "fp32",
    micro_batch: MicroBatch = None,
    compiled: Compile = False,
    device: options.Device = "auto",
    out: Out = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Count the most bytes that a step and a refresh hold, by method and structure. Needs a CUDA device."""
    ground = _ground(model, batch, precision, device, ("resnet18", "vit-b"))
    peak = memory.cuda_peak(ground.precision.device)
    refreshing = Refreshing(
        engine=engine,
        attention=attention,
        steps=steps,
        product_every=product_every,
        solver=solver,
        apply=apply,
        micro_batch=micro_batch,
        compile=compiled,
    )
    structures = _listed("--structure", structure)
    config = ground.config(structures=structures, refreshing=refreshing)
    record = Record("memory", config, ground.precision.device, out)
    rows = memory.measure(ground.networks, structures, batch, ground.precision, refreshing, peak)
    _leave(record, rows, memory.as_table, as_json=as_json, quiet=quiet)


@bench_app.command("peers")
def peers_command(
    model: Models = None,
    batch: Batch = 64,
    precision: PrecisionName = None,
    repeats: Repeats = 40,
    device: options.Device = "auto",
    out: Out = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Time our SAM and F-SAM steps beside those of pytorch_optimizer."""
    peers.peer()
    ground = _ground(model, batch, precision, device, ("resnet18", "vit-b"))
    config = ground.config(repeats=repeats)
    record = Record("peers", config, ground.precision.device, out, pytorch_optimizer=peers.peer_version())
    rows = peers.measure(ground.networks, batch, ground.precision, repeats)
    _leave(record, rows, peers.as_table, as_json=as_json, quiet=quiet)


@bench_app.command("solvers")
def solvers_command(
    model: Models = None,
    batch: Batch = 64,
    structure: Structures = "diagonal",
    precision: PrecisionName = "fp32",
    engine: Engine = "forward",
    attention: Attention = "unfused",
    products: Products = 50,
    device: options.Device = "auto",
    out: Out = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """The objective that each inner solver reaches in a number of products with H."""
    ground = _ground(model, batch, precision, device, ("resnet18", "vit-s"))
    refreshing = Refreshing(engine=engine, attention=attention, steps=products)
    structures = _listed("--structure", structure)
    record = Record(
        "solvers", ground.config(structures=structures, refreshing=refreshing), ground.precision.device, out
    )
    rows = solvers.measure(ground.networks, structures, batch, ground.precision, refreshing)
    _leave(record, rows, solvers.as_table, as_json=as_json, quiet=quiet)


def _listed(option: str, text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigurationError(f"{option} must name at least one, got {text!r}.")
    return names


def _counts(option: str, text: str) -> list[int]:
    counts = [int(word) if word.isdecimal() else 0 for word in _listed(option, text)]
    if 0 in counts:
        raise ConfigurationError(f"{option} must be whole numbers from 1, separated by commas, got {text!r}.")
    return counts


def _leave(record: Record, rows: Iterable[dict[str, Any]], as_table: Any, *, as_json: bool, quiet: bool) -> None:
    """Measure, write down and print."""
    record.collect(_told(rows, quiet))
    _print(record, as_table(record.rows), as_json=as_json)


def _told(rows: Iterable[dict[str, Any]], quiet: bool) -> Iterable[dict[str, Any]]:
    """Says on stderr which row was measured: a command takes minutes."""
    console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)
    for row in rows:
        console.print(*(value for value in row.values() if isinstance(value, str) and value))
        yield row


def _print(record: Record, table: Table, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(record.to_dict(), indent=1))
    else:
        show(table)

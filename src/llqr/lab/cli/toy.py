"""`llqr toy`: the figures of the two-scale pothole model, each with its numbers, and one page for all of them.

The experiments are imported by the commands that run them: matplotlib would slow down every `llqr --help`.
"""

import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from llqr.lab.cli.lazy_group import PLAIN
from llqr.lab.writing import check_folder, explained

if TYPE_CHECKING:
    from llqr.lab.toy.experiment import ToyResult

app = typer.Typer(
    help="The two-scale pothole model: toy figures, phase diagrams, hovering and selection.",
    no_args_is_help=True,
    **PLAIN,
)


def mount(root: typer.Typer) -> None:
    """Add these commands to the command line."""
    root.add_typer(app, name="toy")


def _writable(out: Path) -> Path:
    check_folder("--out", out)
    return out


Out = Annotated[
    Path,
    typer.Option("--out", help="Folder for figures, numbers and report.html.", file_okay=False, callback=_writable),
]
Anisotropy = Annotated[float, typer.Option(min=0.1, max=10, help="Curvature of the bowl's second axis over its first.")]
Seeds = Annotated[int, typer.Option(min=1, help="Number of independent noise schedules.")]
Steps = Annotated[int, typer.Option(min=10, help="Steps of each trajectory.")]

OUT = Path("runs/toy")


@app.command("escape")
def escape_command(
    out: Out = OUT,
    starts: Annotated[int, typer.Option(min=1, help="Number of starting points around the ring.")] = 32,
    steps: Steps = 1200,
    anisotropy: Anisotropy = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the starts' distance from the bottom.")] = 0,
) -> None:
    """Escape from inside the sharp well: SGD, LLQR, SAM and LLQR+SAM at one learning rate."""
    from llqr.lab.toy.escape import run_escape

    options = {"starts": starts, "steps": steps, "anisotropy": anisotropy, "seed": seed}
    _save(run_escape(starts, steps, anisotropy, seed), out, "escape", options)


@app.command("noise")
def noise_command(
    out: Out = OUT,
    seeds: Seeds = 32,
    steps: Steps = 1200,
    variance: Annotated[float, typer.Option(min=1e-300, help="Variance of the noise in the update gradient.")] = 1e-9,
    anisotropy: Anisotropy = 1.0,
) -> None:
    """Ejection from the bottom of the well by gradient noise, and the noise-damping proposition."""
    from llqr.lab.toy.ejection import run_noise

    options = {"seeds": seeds, "steps": steps, "variance": variance, "anisotropy": anisotropy}
    with _bar() as progress:
        result = run_noise(seeds, steps, variance, anisotropy, progress)
    _save(result, out, "noise", options)


@app.command("phase")
def phase_command(
    out: Out = OUT,
    rows: Annotated[int, typer.Option(min=3, help="Cells along lambda_bar, and along the learning rate.")] = 28,
    columns: Annotated[int, typer.Option(min=3, help="Cells along rho.")] = 40,
    steps: Annotated[int, typer.Option(min=10, help="Steps after which a cell counts as trapped.")] = 4000,
) -> None:
    """Escape phase diagrams over (rho, lambda_bar) and over the learning rate, against the predicted line."""
    from llqr.lab.toy.phase import run_phase

    with _bar() as progress:
        result = run_phase(rows, columns, steps, progress)
    _save(result, out, "phase", {"rows": rows, "columns": columns, "steps": steps})


@app.command("hover")
def hover_command(
    out: Out = OUT,
    lambda_bar: Annotated[float, typer.Option(min=1e-6, help="Average curvature of the well.")] = 0.25,
    lambda_eps: Annotated[float, typer.Option(min=0, help="Localized sharpness of the well.")] = 5.0,
    eta: Annotated[float, typer.Option(min=1e-9, help="Learning rate.")] = 0.04,
    rho: Annotated[float, typer.Option(min=1e-9, help="Probe radius.")] = 0.2,
) -> None:
    """Hovering: two-cycle amplitudes of SAM and LLQR+SAM, measured and in closed form."""
    from llqr.lab.toy.hover import run_hover

    options = {"lambda_bar": lambda_bar, "lambda_eps": lambda_eps, "eta": eta, "rho": rho}
    try:
        result = run_hover(lambda_bar, lambda_eps, eta, rho)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    _save(result, out, "hover", options)


@app.command("selection")
def selection_command(
    out: Out = OUT,
    cycles: Annotated[int, typer.Option(min=100, help="Regeneration cycles at each noise scale.")] = 8000,
    seeds: Seeds = 64,
    steps: Annotated[int, typer.Option(min=10, help="Steps after which a visit is cut off.")] = 2000,
) -> None:
    """Occupation of sharp wells in the regenerative model, and mean exit times of the real optimizers."""
    from llqr.lab.toy.selection import run_selection

    with _bar() as progress:
        result = run_selection(cycles, seeds, steps, progress)
    _save(result, out, "selection", {"cycles": cycles, "seeds": seeds, "steps": steps})


@app.command("transfer")
def transfer_command(
    out: Out = OUT,
    steps: Annotated[int, typer.Option(min=200, help="Steps of each run.")] = 4000,
    batch: Annotated[int, typer.Option(min=1, help="Samples per minibatch.")] = 32,
) -> None:
    """Convergence transfer: the running mean of g.Ug under a bounded, changing metric."""
    from llqr.lab.toy.transfer import run_transfer

    with _bar() as progress:
        result = run_transfer(steps, batch, progress)
    _save(result, out, "transfer", {"steps": steps, "batch": batch})


@app.command("all")
def all_command(out: Out = OUT) -> None:
    """Every figure with its default options."""
    for command in (hover_command, escape_command, noise_command, phase_command, selection_command, transfer_command):
        command(out=out)


@app.command("search")
def search_command(
    candidates: Annotated[int, typer.Option(min=100, help="Random landscapes to draw.")] = 1_500_000,
    seed: Annotated[int, typer.Option(help="Seed of the draw.")] = 0,
) -> None:
    """Search for the constants of the toy figures again: prints finalists as JSON lines, the best first."""
    from llqr.theory.search import as_dict, search

    say = Console(stderr=True).print
    for found in search(candidates=candidates, seed=seed, progress=say):
        line = {"worst_path_ratio": found.worst_ratio, "claims_kept_under_jitter": found.robustness}
        typer.echo(json.dumps(line | as_dict(found.constants)))


def _save(result: "ToyResult", out: Path, command: str, options: dict[str, float]) -> None:
    """Save the result and print its sentences; the recorded command names every option."""
    from llqr.lab.toy.page import save

    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", f"{value:g}")]
    with explained(out):
        page = save(result, out, shlex.join(["llqr", "toy", command, *words]))
    typer.echo(result.title)
    for sentence in result.sentences:
        typer.echo(f"  {sentence}")
    typer.echo(f"  -> {page}")


@contextmanager
def _bar() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on stderr, with one line per part of the work."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield report

"""`llqr toy`: the figures of the two-scale pothole model, each with its numbers."""

from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated

import typer

from llqr.lab.cli.options import PLAIN
from llqr.lab.errors import ConfigurationError
from llqr.lab.names import check_known
from llqr.lab.writing import check_folder, explained

app = typer.Typer(**PLAIN)
EXPERIMENTS = ("hover", "escape", "noise", "phase", "selection", "transfer")
IN_A_BOWL = ("escape", "noise")
"""Those whose bowl may be anisotropic."""


@app.command()
def toy(
    name: Annotated[str, typer.Argument(metavar="NAME", help=f"{', '.join(EXPERIMENTS)} or all.")],
    anisotropy: Annotated[
        float,
        typer.Option(min=0.1, max=10, help="Of escape and noise: curvature of the bowl's second axis over its first."),
    ] = 1.0,
    out: Annotated[Path, typer.Option(help="Folder for figures and numbers.", file_okay=False)] = Path("runs/toy"),
) -> None:
    """The two-scale pothole model: toy figures, phase diagrams, hovering and selection."""
    from llqr.lab.toy.experiment import save, single_numbers  # imports matplotlib

    check_known("NAME", name, (*EXPERIMENTS, "all"))
    if anisotropy != 1 and name not in IN_A_BOWL:
        raise ConfigurationError(f"--anisotropy belongs to {' and '.join(IN_A_BOWL)}, got it with {name}.")
    check_folder("--out", out)
    kind, option = ("", "") if anisotropy == 1 else ("-anisotropic", f" --anisotropy {anisotropy:g}")
    for chosen in EXPERIMENTS if name == "all" else (name,):
        run = resolve_name(f"llqr.lab.toy.{chosen}:run_{chosen}")
        result = run(anisotropy=anisotropy) if chosen in IN_A_BOWL else run()
        with explained(out):
            save(chosen + kind, result, out, f"llqr toy {chosen}{option}")
        typer.echo("\n  ".join([run.__doc__, *single_numbers(result.numbers), f"-> {out}"]))

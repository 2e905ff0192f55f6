"""The options that several commands share, and what they mean together."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from llqr.lab import machine
from llqr.lab.config import recipe
from llqr.lab.config.recipe import Recipe
from llqr.lab.config.strict import ConfigurationError
from llqr.lab.training.loop import Execution

Set = Annotated[
    list[str] | None, typer.Option("--set", help="Override a setting of the recipe: key=value, any number of times.")
]
Out = Annotated[Path, typer.Option(help="Folder for the folders of the runs.")]
DataDir = Annotated[
    Path | None, typer.Option(help="Folder that holds the data sets (default: data.root of the recipe).")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Capture = Annotated[
    bool | None,
    typer.Option(
        "--capture/--no-capture", help="Capture passes and refreshes as CUDA graphs (default: on a CUDA device)."
    ),
]
Compile = Annotated[
    bool,
    typer.Option("--compile", help="Compile passes and refreshes with torch.compile: slower to start, then faster."),
]
MaxMinutes = Annotated[
    float | None, typer.Option(min=0, help="Stop after this many minutes, with a checkpoint and exit code 75.")
]
CheckpointMinutes = Annotated[
    float, typer.Option(min=0, help="Least number of minutes between checkpoints, which are written at evaluations.")
]
TensorBoard = Annotated[bool, typer.Option("--tensorboard", help="Also log for TensorBoard, in the run's folder.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Only print the resolved configuration and the memory of the metric.")
]
Keep = Annotated[
    Path | None,
    typer.Option(help="Append the finished runs to this file of results, such as results/cifar100.jsonl."),
]
Methods = Annotated[
    str | None, typer.Option(help="Methods, separated by commas (default: those of the recipe's table).")
]


@dataclass(frozen=True)
class ChosenRecipe:
    """A recipe from the command line, and the name its runs are filed under."""

    name: str
    recipe: Recipe

    def methods(self, listed: str | None) -> list[str]:
        """The methods of a comma-separated list, or the recipe's columns."""
        if listed is None:
            return list(self.recipe.columns)
        methods = [method.strip() for method in listed.split(",") if method.strip()]
        if not methods:
            raise ConfigurationError(f"--methods must name at least one method, got {listed!r}.")
        # Resolved, so that two names of one method give one run.
        return list(dict.fromkeys(self.recipe.run(method).method for method in methods))


def load_recipe(name: str, overrides: list[str] | None, data_dir: Path | None) -> ChosenRecipe:
    """A built-in recipe or a TOML file, with the changes from the command line."""
    root = [] if data_dir is None else [f"data.root={json.dumps(str(data_dir))}"]
    loaded = recipe.load(name, [*(overrides or []), *root])
    plain, at, variant = name.partition("@")
    return ChosenRecipe((Path(plain).stem if plain.endswith(".toml") else plain) + at + variant, loaded)


def execution(
    device: str, capture: bool | None, compiled: bool, checkpoint_minutes: float, tensorboard: bool
) -> Execution:
    """How runs are carried out, from the command line."""
    chosen = machine.choose_device(device)
    if capture and chosen.type != "cuda":
        raise ConfigurationError(f"--capture needs a CUDA device, got {chosen}.")
    captured = chosen.type == "cuda" if capture is None else capture
    return Execution(chosen, captured, compiled, checkpoint_minutes, tensorboard)

"""Runs that are asked for."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llqr.lab.config.recipe import Recipe
from llqr.lab.config.run import Run
from llqr.lab.names import check_folder_name


@dataclass(frozen=True)
class PlannedRun:
    """A run with a seed, the name of the recipe it is filed under, and the folder its files go to."""

    recipe: str
    title: str
    run: Run
    seed: int
    path: Path

    @property
    def label(self) -> str:
        return f"{self.recipe} {self.run.method} seed {self.seed}"

    def to_dict(self) -> dict[str, Any]:
        """What was asked for, as it is written down."""
        return {"recipe": self.recipe, "seed": self.seed, "run": self.run.to_dict()}


def plan(name: str, recipe: Recipe, methods: Sequence[str], seeds: Sequence[int], out: Path) -> list[PlannedRun]:
    """Every method with every seed, the seeds outermost: a comparison that is cut short is fair to all methods."""
    for part in name.split("/"):
        check_folder_name("the name of a recipe", part)
    runs = [recipe.run(method) for method in methods]
    return [
        PlannedRun(name, recipe.title, run, seed, out / name / run.method / f"seed{seed}")
        for seed in seeds
        for run in runs
    ]

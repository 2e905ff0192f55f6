"""Runs that are asked for, and what they would do: the resolved configuration and the size of the metric."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llqr.lab.config.recipe import Recipe
from llqr.lab.config.run import Run
from llqr.lab.names import check_folder_name
from llqr.lab.number_table import IN_MIB
from llqr.lab.runs.json_files import flatten, plain


@dataclass(frozen=True)
class PlannedRun:
    """A run with a seed, the name of the recipe it is filed under, and the folder its files go to.

    Attributes:
        setting: what a sweep has set.
    """

    recipe: str
    title: str
    run: Run
    seed: int
    path: Path
    setting: Sequence[str] = ()

    @property
    def name(self) -> str:
        """Of the recipe as it was run."""
        return " ".join((self.recipe, *self.setting))

    @property
    def label(self) -> str:
        return f"{self.name} {self.run.method} seed {self.seed}"

    def to_dict(self) -> dict[str, Any]:
        """What was asked for, as it is written down."""
        return {"recipe": self.recipe, "seed": self.seed, "run": self.run.to_dict()}


def plan(
    name: str, recipe: Recipe, methods: Sequence[str], seeds: Sequence[int], out: Path, setting: Sequence[str] = ()
) -> list[PlannedRun]:
    """Every method with every seed, the seeds outermost: a comparison that is cut short is fair to all methods."""
    for part in name.split("/"):
        check_folder_name("the name of a recipe", part)
    runs = [recipe.run(method) for method in methods]
    return [
        PlannedRun(name, recipe.title, run, seed, out / name / run.method / f"seed{seed}", setting)
        for seed in seeds
        for run in runs
    ]


def describe(planned: Sequence[PlannedRun]) -> list[dict[str, Any]]:
    """Return runs as plain data: their configuration, and sizes from models that take no memory."""
    described = []
    for one in planned:
        run = one.run
        model = run.build_without_memory()
        sizes: dict[str, Any] = {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "steps": steps(run),
        }
        if run.geometry is not None:
            with warnings.catch_warnings(action="ignore"):  # about the blocks that fall back, which are listed here
                metric = run.geometry.metric(model)
            sizes["metric_scalars"] = metric.stored()
            sizes["metric_bytes"] = metric.memory()["total"]
            sizes["metric_fallbacks"] = run.geometry.fallbacks(metric)
        described.append(plain(one.to_dict()) | {"folder": str(one.path)} | sizes)
    return described


def steps(run: Run) -> int | None:
    """Count the steps of a run, where that is known without reading its data."""
    if run.training.steps is not None:
        return run.training.steps
    steps_per_epoch = run.task_type.steps_per_epoch(run)
    return None if steps_per_epoch is None else run.training.total_steps(steps_per_epoch)


def explain(planned: Sequence[PlannedRun]) -> Iterator[str]:
    """Describe the runs in words, recipe by recipe: what all methods share, then how they differ."""
    for name in dict.fromkeys(one.recipe for one in planned):
        own = [one for one in planned if one.recipe == name]
        seeds = list(dict.fromkeys(one.seed for one in own))
        firsts = {one.path.parent: one for one in reversed(own)}  # of each method, whichever seeds are planned
        found = describe(list(reversed(firsts.values())))
        settings = [dict(flatten(one["run"])) for one in found]
        shared = {k: v for k, v in settings[0].items() if all(k in other and other[k] == v for other in settings)}
        run = own[0].run
        length = f"{found[0]['steps']:,} steps" if found[0]["steps"] else f"{run.training.epochs:,} epochs"
        yield f"# {name}: {own[0].title}"
        yield f"# {found[0]['parameters']:,} parameters, {length}, seeds {', '.join(map(str, seeds))}"
        yield from (f"# {remark}" for remark in [run.task_type.remark(run)] if remark)
        yield from (f"{key} = {value!r}" for key, value in shared.items() if value is not None)
        for one, its_settings in zip(found, settings, strict=True):
            yield f"\n## {one['run']['method']}"
            differing = {key: value for key, value in its_settings.items() if key not in shared}
            yield from (f"{key} = {value!r}" for key, value in differing.items() if value is not None)
            if "metric_bytes" in one:
                yield f"# metric: {one['metric_scalars']:,} numbers, {IN_MIB * one['metric_bytes']:,.1f} MiB"
            else:
                yield "# no metric"
            for block, kind in one.get("metric_fallbacks", {}).items():
                yield f"# too large, and stored as {kind}: {block}"
            yield f"# files: {one['folder']}"
        yield ""

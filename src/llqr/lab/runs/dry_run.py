"""What a command would do, without doing it: the resolved configuration, and what the metric would take."""

import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from llqr import Metric
from llqr.lab.training.method import fallbacks
from llqr.lab.config.recipe import GeometrySettings, Recipe, Run
from llqr.lab.runs.folder import Plan, flatten

MIB = 2**20


def describe(plans: Sequence[Plan]) -> list[dict[str, Any]]:
    """Plans as plain data: their configuration, and sizes from models that take no memory."""
    models: dict[str, nn.Module] = {}
    metrics: dict[tuple[str, str], dict[str, Any]] = {}
    described = []
    for plan in plans:
        name, run = plan.name, plan.run
        if name not in models:
            with torch.device("meta"):
                models[name] = plan.recipe.build_model()
        sizes = {"parameters": sum(parameter.numel() for parameter in models[name].parameters())}
        sizes["steps"] = steps(plan.recipe, run)
        if run.geometry is not None:
            place = name, json.dumps([run.geometry.structure, run.geometry.max_side])
            if place not in metrics:
                metrics[place] = _metric(models[name], run.geometry)
            sizes |= metrics[place]
        described.append(plan.to_dict() | {"folder": str(plan.folder)} | sizes)
    return described


def steps(recipe: Recipe, run: Run) -> int | None:
    """How many steps a run takes, where that is known without reading its data."""
    training = run.training
    if training.steps is not None:
        return training.steps
    an_epoch = recipe.domain.steps_an_epoch(run.data.name, training.batch_size, training.last)
    return None if an_epoch is None else training.total_steps(an_epoch)


def explain(plans: Sequence[Plan]) -> Iterator[str]:
    """Lines for a reader: for every recipe what all its methods share, and then in what they differ."""
    for name in dict.fromkeys(plan.name for plan in plans):
        own = [plan for plan in plans if plan.name == name]
        seeds = list(dict.fromkeys(plan.seed for plan in own))
        found = describe([plan for plan in own if plan.seed == seeds[0]])
        settings = [dict(flatten(one["run"])) for one in found]
        shared = {k: v for k, v in settings[0].items() if all(k in other and other[k] == v for other in settings)}
        yield f"# {name}: {own[0].recipe.title}"
        length = f"{found[0]['steps']:,} steps" if found[0]["steps"] else f"{own[0].run.training.epochs:,} epochs"
        yield f"# {found[0]['parameters']:,} parameters, {length}, seeds {', '.join(map(str, seeds))}"
        data = own[0].run.data
        yield from (f"# {remark}" for remark in [own[0].recipe.domain.remark(data.name, Path(data.root))] if remark)
        yield from _lines(shared)
        for one, its_settings in zip(found, settings, strict=True):
            if len(found) > 1:
                yield f"\n## {one['run']['method']}"
                yield from _lines({k: v for k, v in its_settings.items() if k not in shared})
            yield from (f"# {line}" for line in _memory(one))
            yield f"# files: {one['folder']}"
        yield ""


def _metric(model: nn.Module, settings: GeometrySettings) -> dict[str, Any]:
    """What the metric of a model takes, and which blocks are stored otherwise than was asked for."""
    limit = {} if settings.max_side is None else {"max_side": settings.max_side}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the blocks that fall back, which are told here
        metric = Metric(model, structure=settings.structure, **limit)
    return {
        "metric_scalars": metric.stored(),
        "metric_bytes": metric.memory()["total"],
        "metric_fallbacks": fallbacks(metric, settings.structure),
    }


def _lines(settings: dict[str, Any]) -> Iterator[str]:
    return (f"{key} = {value!r}" for key, value in settings.items() if value is not None)


def _memory(found: dict[str, Any]) -> Iterator[str]:
    if "metric_bytes" not in found:
        yield "no metric"
        return
    yield f"metric: {found['metric_scalars']:,} numbers, {found['metric_bytes'] / MIB:,.1f} MiB"
    yield from (f"too large, and stored as {kind}: {name}" for name, kind in found["metric_fallbacks"].items())

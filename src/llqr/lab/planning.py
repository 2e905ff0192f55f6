"""What a command would do, without doing it: the resolved configuration, and what the metric would take."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from llqr import Metric
from llqr.lab import data
from llqr.lab.recipe import Run
from llqr.lab.runs import Plan, flatten

MIB = 2**20


def describe(plans: Sequence[Plan]) -> list[dict[str, Any]]:
    """Plans as plain data: their configuration, and sizes from models that take no memory."""
    models: dict[str, nn.Module] = {}
    metrics: dict[tuple[str, str], Metric] = {}
    described = []
    for plan in plans:
        name, run = plan.name, plan.run
        if name not in models:
            with torch.device("meta"):
                models[name] = plan.recipe.build_model()
        sizes = {"parameters": sum(parameter.numel() for parameter in models[name].parameters()), "steps": steps(run)}
        if run.geometry is not None:
            structure = run.geometry.structure
            if (name, structure) not in metrics:
                metrics[name, structure] = Metric(models[name], structure=structure)
            metric = metrics[name, structure]
            sizes |= {"metric_scalars": metric.stored(), "metric_bytes": metric.memory()["total"]}
        described.append(plan.to_dict() | {"folder": str(plan.folder)} | sizes)
    return described


def steps(run: Run) -> int:
    """How many steps a run takes, known without reading its data."""
    training, count = run.training, data.source(run.data.name).train_count
    batches = count // training.batch_size if training.last == "drop" else -(-count // training.batch_size)
    return training.epochs * batches


def explain(plans: Sequence[Plan]) -> Iterator[str]:
    """Lines for a reader: for every recipe what all its methods share, and then in what they differ."""
    for name in dict.fromkeys(plan.name for plan in plans):
        own = [plan for plan in plans if plan.name == name]
        seeds = list(dict.fromkeys(plan.seed for plan in own))
        found = describe([plan for plan in own if plan.seed == seeds[0]])
        settings = [dict(flatten(one["run"])) for one in found]
        shared = {k: v for k, v in settings[0].items() if all(k in other and other[k] == v for other in settings)}
        yield f"# {name}: {own[0].recipe.title}"
        sizes = f"{found[0]['parameters']:,} parameters, {found[0]['steps']:,} steps"
        yield f"# {sizes}, seeds {', '.join(map(str, seeds))}"
        yield from _lines(shared)
        for one, its_settings in zip(found, settings, strict=True):
            if len(found) > 1:
                yield f"\n## {one['run']['method']}"
                yield from _lines({k: v for k, v in its_settings.items() if k not in shared})
            yield f"# {_memory(one)}"
            yield f"# files: {one['folder']}"
        yield ""


def _lines(settings: dict[str, Any]) -> Iterator[str]:
    return (f"{key} = {value!r}" for key, value in settings.items() if value is not None)


def _memory(found: dict[str, Any]) -> str:
    if "metric_bytes" not in found:
        return "no metric"
    kept = found["metric_bytes"] / MIB
    return f"metric: {found['metric_scalars']:,} numbers, {kept:,.1f} MiB"

"""What a command would do, without doing it: the resolved configuration, and what the metric would take."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from llqr import Metric
from llqr.lab import data
from llqr.lab.runs import Plan, flatten, plain

MIB = 2**20


def describe(plan: Plan) -> dict[str, Any]:
    """A plan as plain data: its configuration, and sizes from a model that takes no memory."""
    with torch.device("meta"):
        model = plan.recipe.build_model()
    geometry, training = plan.run.geometry, plan.run.training
    sizes: dict[str, Any] = {"parameters": sum(parameter.numel() for parameter in model.parameters())}
    count = data.source(plan.run.data.name).train_count
    batches = count // training.batch_size if training.last == "drop" else -(-count // training.batch_size)
    sizes["steps"] = training.epochs * batches
    if geometry is not None:
        metric = Metric(model, structure=geometry.structure)
        sizes |= {"metric_scalars": metric.stored(), "metric_bytes": metric.memory()["total"]}
    return plain(
        {"recipe": plan.name, "folder": str(plan.folder), "seed": plan.seed, "run": plan.run.to_dict()} | sizes
    )


def explain(plans: Sequence[Plan]) -> Iterator[str]:
    """Lines for a reader: for every recipe what all its methods share, and then in what they differ."""
    names = list(dict.fromkeys(plan.name for plan in plans))
    for name in names:
        own = [plan for plan in plans if plan.name == name]
        seeds = list(dict.fromkeys(plan.seed for plan in own))
        methods = {plan.run.method: describe(plan) for plan in own if plan.seed == seeds[0]}
        settings = {method: dict(flatten(found["run"])) for method, found in methods.items()}
        first = next(iter(settings.values()))
        shared = {k: v for k, v in first.items() if all(k in s and s[k] == v for s in settings.values())}
        sizes = next(iter(methods.values()))
        yield f"# {name}: {own[0].recipe.title}"
        yield f"# {sizes['parameters']:,} parameters, {sizes['steps']:,} steps, seeds {', '.join(map(str, seeds))}"
        yield from _lines(shared)
        for method, found in methods.items():
            if len(methods) > 1:
                yield f"\n## {method}"
                yield from _lines({k: v for k, v in settings[method].items() if k not in shared})
            yield f"# {_memory(found)}"
            yield f"# files: {found['folder']}"
        yield ""


def _lines(settings: dict[str, Any]) -> Iterator[str]:
    return (f"{key} = {value!r}" for key, value in settings.items() if value is not None)


def _memory(found: dict[str, Any]) -> str:
    if "metric_bytes" not in found:
        return "no metric"
    kept = found["metric_bytes"] / MIB
    return f"metric: {found['metric_scalars']:,} numbers, {kept:,.1f} MiB"

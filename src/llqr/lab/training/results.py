"""Summarise the log and the metric of a finished run, for ``result.json``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeVar

from llqr import Geometry
from llqr.lab.tasks import Task

if TYPE_CHECKING:
    from llqr.lab.training.loop import Training

T = TypeVar("T")
Records = Sequence[dict[str, Any]]


def result_of(training: Training) -> dict[str, Any]:
    """Summarise a finished run."""
    planned, task, geometry = training.planned, training.task, training.geometry
    run, records = planned.run, training.folder.log.records
    best, timed, step_seconds = best_record(records, task), typical(records), seconds_per_step(records)
    assert step_seconds is not None
    refreshes = [report for record in records for report in record["refreshes"]]
    seconds = {part: sum(record["seconds"][part] for record in records) for part in ("train", "eval", "refresh")}
    result: dict[str, Any] = {
        "recipe": planned.recipe,
        "title": planned.title,
        "task": run.task.name,
        "data": run.data.name,
        "model": run.model.name,
        "method": run.method,
        "seed": planned.seed,
        "metric": task.metric,
        "larger_is_better": task.larger_is_better,
        "split": task.split,
        "best": best[task.split][task.metric],
        "best_epoch": best["epoch"],
        "best_step": best["step"],
        "last": records[-1][task.split][task.metric],
        task.split: records[-1][task.split],
        "seconds": seconds | {"total": seconds["train"] + seconds["eval"]},
        "epoch_seconds": step_seconds * len(training.batches),
        "step_seconds": step_seconds,
        "rate": fmean((r["rate"] for r in timed), weights=[r["seconds"]["train"] for r in timed]),
        "refreshes": len(refreshes),
        "refreshes_rejected": sum(not report["accepted"] for report in refreshes),
        "counted_in": run.training.counted_in,
        "epochs": training.epochs,
        "steps": training.optimizer.steps,
        "passes_per_step": run.passes_per_step(training.total_steps),
        "unit": task.unit,
        "parameters": sum(parameter.numel() for parameter in training.model.parameters()),
        "metric_bytes": 0,
        "metric_fallbacks": {},
        "layer_effects": None,
    }
    if geometry is not None and run.geometry is not None:
        result["metric_bytes"] = geometry.memory()["allocated"]
        result["metric_fallbacks"] = run.geometry.fallbacks(geometry.metric)
        result["layer_effects"] = training.effects
    if run.probe is not None and run.probe.start_after:
        result["probing_step_seconds"] = seconds_per_step(records, since=run.probe.start_after)
    if task.split == "valid":
        started = time.perf_counter()
        result["test_of_best"] = training.test()
        result["seconds"]["test"] = time.perf_counter() - started
    return result | task.facts()


def layer_effects(geometry: Geometry | None) -> dict[str, dict[str, float]]:
    """Return what `U` did to each layer's part of a gradient at the last accepted refresh of this process."""
    return {
        layer: {"change": round(effect.change, 4), "cosine": round(effect.cosine, 4)}
        for layer, effect in (geometry.layer_effects() if geometry is not None else {}).items()
    }


def best_record(records: Records, task: Task) -> dict[str, Any]:
    """Return the first of the evaluations with the best metric."""
    choose = max if task.larger_is_better else min
    return choose(records, key=lambda record: float(record[task.split][task.metric]))


def typical(intervals: Sequence[T]) -> Sequence[T]:
    """Leave out the first, which pays for kernel selection and graph capture, unless it is the only one."""
    return intervals[1:] or intervals


def seconds_per_step(records: Records, since: int = 0) -> float | None:
    """Average over typical intervals that began at step ``since`` or later, refreshes included."""
    starts = [0, *(record["step"] for record in records[:-1])]
    intervals = list(zip(starts, records, strict=True))
    chosen = [(start, record) for start, record in typical(intervals) if start >= since]
    steps = sum(record["step"] - start for start, record in chosen)
    return sum(record["seconds"]["train"] for _, record in chosen) / steps if steps else None

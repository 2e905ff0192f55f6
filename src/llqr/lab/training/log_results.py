"""What the log of a run comes to: its best evaluation, its times and its refreshes."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any, TypeVar

from llqr.lab.tasks import Task

T = TypeVar("T")
Records = Sequence[dict[str, Any]]


def best_record(records: Records, task: Task) -> dict[str, Any]:
    """The first of the evaluations with the best metric."""
    choose = max if task.larger_is_better else min
    return choose(records, key=lambda record: float(record[task.split][task.metric]))


def results_of(records: Records, task: Task, steps_per_epoch: int) -> dict[str, Any]:
    """The entries of a result that the log alone decides."""
    best = best_record(records, task)
    refreshes = [report for record in records for report in record["refreshes"]]
    seconds = {part: sum(record["seconds"][part] for record in records) for part in ("train", "eval", "refresh")}
    step_seconds = seconds_per_step(records)
    assert step_seconds is not None
    return {
        "best": best[task.split][task.metric],
        "best_epoch": best["epoch"],
        "best_step": best["step"],
        "last": records[-1][task.split][task.metric],
        task.split: records[-1][task.split],
        "seconds": seconds | {"total": seconds["train"] + seconds["eval"]},
        "epoch_seconds": step_seconds * steps_per_epoch,
        "step_seconds": step_seconds,
        "rate": fmean(record["rate"] for record in typical(records)),
        "refreshes": len(refreshes),
        "refreshes_rejected": sum(not report["accepted"] for report in refreshes),
    }


def typical(intervals: Sequence[T]) -> Sequence[T]:
    """Without the first, which pays for kernel selection and graph capture, unless it is the only one."""
    return intervals[1:] or intervals


def seconds_per_step(records: Records, since: int = 0) -> float | None:
    """The mean over typical intervals that began at step ``since`` or later, refreshes included."""
    starts = [0, *(record["step"] for record in records[:-1])]
    intervals = list(zip(starts, records, strict=True))
    chosen = [(start, record) for start, record in typical(intervals) if start >= since]
    steps = sum(record["step"] - start for start, record in chosen)
    return sum(record["seconds"]["train"] for _, record in chosen) / steps if steps else None

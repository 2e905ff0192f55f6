"""Carry out planned runs one after the other: finished ones are read, begun ones are resumed, the rest are made."""

import gc
from collections.abc import Sequence
from typing import Any

from llqr.lab import machine
from llqr.lab.errors import Stopped
from llqr.lab.number_table import spread
from llqr.lab.progress import Display
from llqr.lab.runs.folder import RunFolder
from llqr.lab.runs.planned import PlannedRun
from llqr.lab.stop import Stop
from llqr.lab.tasks import Task
from llqr.lab.tasks.task import TaskCache
from llqr.lab.training.loop import Execution, Training


def carry_out(
    planned: Sequence[PlannedRun], execution: Execution, stop: Stop, display: Display
) -> list[dict[str, Any]]:
    """The results of all runs, in their order; `Stopped` if a signal or the time limit comes first."""
    for one in planned:
        RunFolder(one.path).check(one)
    tasks = TaskCache(execution.device)
    results = []
    for one in planned:
        folder = RunFolder(one.path)
        result, note = folder.result(), "already done"
        if result is None:
            if stop.requested:
                raise Stopped(f"Stopped by {stop.reason} before {one.label}; the same command resumes here.")
            with folder.locked():
                result = folder.result()  # of the process that held the lock until now
                if result is None:
                    task = tasks.load(one.run, one.seed)
                    result, note = _train(one, task, execution, stop, display), "done"
        results.append(result)
        best, last = spread(result["best"]), spread(result["last"])
        display.end(f"{one.label}: {note}, best {result['metric']} {best}, last {last}")
    return results


def _train(planned: PlannedRun, task: Task, execution: Execution, stop: Stop, display: Display) -> dict[str, Any]:
    training = Training(planned, task, execution)
    how: dict[str, Any] = {"capture": execution.capture, "compile": execution.compile}
    if execution.shared_device:
        how |= {"shared": True}
    training.folder.begin(planned, machine.describe(execution.device) | how)
    training.resume()
    result = training.run(stop, display)
    if result is None:
        raise Stopped(
            f"{planned.label}: stopped by {stop.reason} after {training.optimizer.steps} of {training.total_steps} "
            "steps; the same command resumes from the checkpoint."
        )
    # A run holds graphs and tensors in reference cycles; the next one needs their memory.
    del training
    gc.collect()
    return result

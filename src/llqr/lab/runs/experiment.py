"""Carry out planned runs one after the other: finished ones are read, begun ones go on, the rest are made."""

import gc
from collections.abc import Sequence
from typing import Any

from llqr.lab import machine, tasks
from llqr.lab.errors import Stopped
from llqr.lab.training.progress import Display
from llqr.lab.config.recipe import Recipe
from llqr.lab.runs.folder import Plan, RunFolder
from llqr.lab.training.stop import Stop
from llqr.lab.tasks import Task
from llqr.lab.training.loop import Execution, Training


def carry_out(plans: Sequence[Plan], execution: Execution, stop: Stop, display: Display) -> list[dict[str, Any]]:
    """The results of all plans, in their order; `Stopped` if a signal or the time limit comes first."""
    for plan in plans:
        RunFolder(plan.folder).check(plan)
    loaded = _LoadedOnce(execution)
    results = []
    for plan in plans:
        folder = RunFolder(plan.folder)
        result, note = folder.result(), "done before"
        if result is None:
            if stop.requested:
                raise Stopped(f"Stopped by {stop.reason} before {plan.label}; the same command goes on from here.")
            result, note = _train(plan, loaded.task(plan.recipe), execution, stop, display), "done"
        results.append(result)
        display.end(f"{plan.label}: {note}, best {result['metric']} {result['best']:.2f}, last {result['last']:.2f}")
    return results


def _train(plan: Plan, task: Task, execution: Execution, stop: Stop, display: Display) -> dict[str, Any]:
    folder = RunFolder(plan.folder)
    training = Training(plan, task, execution)
    folder.begin(
        plan, machine.describe(execution.device) | {"capture": execution.capture, "compile": execution.compile}
    )
    training.resume()
    if not training.run(stop, display):
        raise Stopped(
            f"{plan.label}: stopped by {stop.reason} after {training.optimizer.steps} of {training.total_steps} steps; "
            "the same command goes on from the checkpoint."
        )
    # A run holds graphs and tensors in reference cycles; the next one needs their memory.
    del training
    gc.collect()
    return folder.result()


class _LoadedOnce:
    """The task of the latest recipe: its data are read when they are first needed, once for all of its runs."""

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        self._recipe: Recipe | None = None
        self._task: Task | None = None

    def task(self, recipe: Recipe) -> Task:
        if self._recipe is not recipe:
            self._recipe, self._task = recipe, tasks.load(recipe, self._execution.device)
        return self._task

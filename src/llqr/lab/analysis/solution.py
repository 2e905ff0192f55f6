"""The solution that a finished run found, rebuilt from its folder, and what is measured there.

``analysis.json`` in the folder of a run holds the sharpness of the solution and slices of the loss surface through it.
It is written once and read ever after, also where neither the checkpoint nor the data are.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from llqr import Metric
from llqr.lab import machine, tasks
from llqr.lab.analysis import sharpness, slices
from llqr.lab.config.recipe import Method, Recipe, Run
from llqr.lab.config.strict import make
from llqr.lab.errors import DataError
from llqr.lab.runs.folder import RunFolder, read_json, versions, write_json
from llqr.lab.tasks import Task
from llqr.lab.training import checkpoint
from llqr.lab.training.method import optimizer_for
from llqr.lab.training.precision import Precision

RANDOM_DIRECTIONS = 3
# The same samples for every run that is measured, whatever the seed it was trained with.
SAMPLES_SEED = 0


@dataclass(frozen=True)
class Solution:
    """A trained network, the metric it was trained with if there was one, and the task it solves."""

    model: nn.Module
    metric: Metric | None
    task: Task
    run: Run


def run_of(config: Mapping[str, Any]) -> Run:
    """The run that a folder's configuration describes."""
    return make(Run, config["run"], "run", lambda key: "config.json")


def recipe_of(run: Run) -> Recipe:
    """A recipe with this run as its only method: what data and networks are loaded from."""
    return Recipe(
        title=run.method,
        seeds=1,
        columns=(run.method,),
        task=run.task,
        data=run.data,
        model=run.model,
        training=run.training,
        schedule=run.schedule,
        bases={"own": run.base},
        probes={} if run.probe is None else {"own": run.probe},
        geometries={} if run.geometry is None else {"own": run.geometry},
        methods={
            run.method: Method(
                "own",
                probe=None if run.probe is None else "own",
                geometry=None if run.geometry is None else "own",
                transport=run.transport,
            )
        },
    )


def load(folder: RunFolder, task: Task, device: torch.device) -> Solution:
    """The network at the end of the run, with the metric it ended with."""
    if not folder.checkpoint.exists():
        raise DataError(f"{folder.checkpoint} is not there.")
    run = run_of(folder.config())
    model = task.place(recipe_of(run).build_model())
    optimizer = optimizer_for(run, model, task)
    state = checkpoint.load(folder.checkpoint, device)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return Solution(model, None if optimizer.geometry is None else optimizer.geometry.metric, task, run)


def analyse(solution: Solution, device: torch.device, samples: int) -> dict[str, Any]:
    """Sharpness and slices on ``samples`` training samples, in full float32."""
    started = time.perf_counter()
    Precision("fp32", device).set_up()
    task, batch_size = solution.task, solution.run.training.batch_size
    batch, samples = task.samples(samples, SAMPLES_SEED)
    forward, piece = task.differentiable_forward, task.samples_in(batch_size, batch)
    surface = sharpness.LossSurface(solution.model, task.loss, batch, forward=forward, piece=piece)
    found = sharpness.measure(surface, solution.metric)
    lines = [slices.along_eigenvector(surface, found.top.vector)]
    lines += [slices.along_random(surface, seed) for seed in range(RANDOM_DIRECTIONS)]
    return {
        "samples": samples,
        "loss": surface.loss(surface.weights),
        "sharpness": found.to_dict(),
        "slices": [line.to_dict() for line in lines],
        "engine": surface.engine,
        "versions": versions(),
        "machine": machine.describe(device),
        "seconds": time.perf_counter() - started,
    }


class Analyst:
    """Measures solutions one after the other and writes down what it finds; data are read once for all of them.

    Args:
        samples: how many training samples to measure on; None keeps what was measured before, and 0 measures nothing.
    """

    def __init__(self, device: torch.device, samples: int | None = None) -> None:
        self.device = device
        self.samples = samples
        self._data: tuple[Any, ...] | None = None
        self._task: Task | None = None

    def needed(self, folder: RunFolder) -> bool:
        """Whether there is something to measure: a finished run that was not measured on as many samples."""
        if self.samples == 0 or folder.result() is None:
            return False
        file = folder.path / "analysis.json"
        known = read_json(file) if file.exists() else None
        return known is None or self.samples not in (None, known["samples"])

    def measure(self, folder: RunFolder) -> None:
        """Write the folder's ``analysis.json``; a `DataError` if the checkpoint or the data are missing."""
        run = run_of(folder.config())
        data = (run.task, run.data, run.training)
        if data != self._data:
            self._task = tasks.load(recipe_of(run), self.device)
            self._data = data
        found = analyse(load(folder, self._task, self.device), self.device, self.samples or self._task.samples_measured)
        write_json(folder.path / "analysis.json", found)

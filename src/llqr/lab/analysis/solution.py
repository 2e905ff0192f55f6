"""The network that a finished run ended with, rebuilt from its folder, and the sharpness measured there.

``analysis.json`` in the folder of a run holds the sharpness of the solution. Once written it is enough: neither the
checkpoint nor the data are needed to read it.
"""

import time
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from llqr import Geometry, Metric
from llqr.lab import machine
from llqr.lab.analysis import sharpness
from llqr.lab.config.run import Run
from llqr.lab.errors import DataError
from llqr.lab.passes import Precision
from llqr.lab.runs.folder import RunFolder
from llqr.lab.runs.json_files import read_json, write_json
from llqr.lab.runs.provenance import made_now
from llqr.lab.tasks import Task
from llqr.lab.tasks.task import TaskCache
from llqr.lab.training import checkpoint

# The same samples for every run, whatever seed it was trained with.
SAMPLES_SEED = 0


def load(folder: RunFolder, task: Task, device: torch.device) -> tuple[nn.Module, Metric | None]:
    """The network at the end of the run, and its last metric if it learned one."""
    if not folder.checkpoint.exists():
        raise DataError(f"{folder.checkpoint} is not there.")
    run = folder.run()
    model = task.place(task.new_model(run))
    optimizer = run.build_optimizer(model, task)
    state = checkpoint.load(folder.checkpoint, device)
    try:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{folder.checkpoint} does not fit the run of its config.json: {reason}") from error
    geometry = optimizer.geometry
    return model, geometry.metric if isinstance(geometry, Geometry) else None


def analyse(folder: RunFolder, task: Task, device: torch.device, samples: int) -> dict[str, Any]:
    """Sharpness on ``samples`` training samples, or on all if there are fewer, in full float32."""
    started = time.perf_counter()
    Precision("fp32", device).set_up()
    model, metric = load(folder, task, device)
    batch, samples = task.samples(samples, SAMPLES_SEED)
    piece = task.samples_in(folder.run().training.batch_size, batch)
    surface = sharpness.LossSurface(model, task.loss, batch, forward=task.differentiable_forward, piece=piece)
    found = sharpness.measure(surface, metric)
    return {
        "samples": samples,
        "loss": surface.loss(),
        "sharpness": asdict(found),
        "engine": surface.engine,
        **made_now(machine.describe(device)),
        "seconds": time.perf_counter() - started,
    }


class Analyst:
    """Measures solutions one after the other and writes the results to their folders; shared data are read once.

    On so many training ``samples``; None keeps what was measured before, and 0 measures nothing.
    """

    def __init__(self, device: torch.device, samples: int | None = None) -> None:
        self.device = device
        self.samples = samples
        self._tasks = TaskCache(device)

    def needed(self, folder: RunFolder) -> bool:
        """Whether there is something to measure: a finished run that was not measured on as many samples."""
        if self.samples == 0 or folder.result() is None:
            return False
        file = folder.path / "analysis.json"
        known = read_json(file) if file.exists() else None
        return known is None or self.samples not in (None, known["samples"])

    def measure(self, folder: RunFolder, run: Run | None = None) -> None:
        """Write the folder's ``analysis.json``; a `DataError` if the checkpoint or the data are missing.

        ``run`` says where the data are now, if not where the folder says.
        """
        task = self._tasks.load(run or folder.run(), folder.config()["seed"])
        samples = self.samples or task.samples_measured
        write_json(folder.path / "analysis.json", analyse(folder, task, self.device, samples))

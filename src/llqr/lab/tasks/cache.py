"""The task that was loaded last, because many runs in a row share their data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from llqr.lab.tasks.task import Task

if TYPE_CHECKING:
    from llqr.lab.config.run import Run


class TaskCache:
    """Reads the data of a run when they are needed and keeps them for the runs after it that use the same."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._latest: tuple[tuple[object, ...], Task] | None = None

    def load(self, run: Run, seed: int) -> Task:
        key = (run.task, run.data, run.training, seed if run.task_type.varies_with_seed else None)
        if self._latest is None or self._latest[0] != key:
            self._latest = None  # its memory is free before the next data are read
            self._latest = key, run.load_task(self._device, seed)
        return self._latest[1]

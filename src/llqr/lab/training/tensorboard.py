"""The log of a run for TensorBoard, beside the JSON lines and with the same names."""

from math import isfinite
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from llqr.lab.runs.json_files import flatten


class Board(SummaryWriter):
    """Writes every number of a record by its step, and the effect of every refresh by the step where it began.

    What an earlier command wrote after ``step`` is superseded.
    """

    def __init__(self, folder: Path, step: int) -> None:
        super().__init__(str(folder / "tensorboard"), purge_step=step + 1)

    def write(self, record: dict[str, Any]) -> None:
        for key, value in flatten(record):
            if isinstance(value, int | float) and not isinstance(value, bool):
                self.add_scalar(key.replace(".", "/"), value, record["step"])
        for report in record["refreshes"]:
            for key in ("change", "cosine"):
                if report["accepted"] and isfinite(report[key]):
                    self.add_scalar(f"refresh/{key}", report[key], report["step"])
        self.flush()

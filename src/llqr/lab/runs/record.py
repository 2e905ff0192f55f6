"""A run that was made, wherever it was read from."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from llqr.lab.config.run import Run


def text_of(result: Mapping[str, Any] | None) -> str | None:
    """The key of the prepared text in a result, see `llqr.lab.text.prepared_folder`."""
    key: str | None = (result or {}).get("text", {}).get("key")
    return key


@dataclass(frozen=True)
class RunRecord:
    """What was asked for and what came of it: ``result`` is None until the run is finished.

    ``config`` has the fields of a ``config.json``; ``analysis`` is what was measured of the solution, if anything.
    ``origin`` says where the run was read: a folder, or a file and its line.
    """

    config: dict[str, Any]
    result: dict[str, Any] | None
    analysis: dict[str, Any] | None
    origin: str

    @property
    def recipe(self) -> str:
        return str(self.config["recipe"])

    @property
    def method(self) -> str:
        return str(self.config["run"]["method"])

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @cached_property
    def run(self) -> Run:
        """The run that was made. Options that are newer than it have their defaults, which change nothing."""
        return Run.from_dict(self.config["run"], self.origin)

    @property
    def label(self) -> str:
        return f"{self.recipe} {self.method} seed {self.seed}"

    @property
    def tested(self) -> float | None:
        """The metric on the test set, where the run chose its best weights by a validation set."""
        if self.result is None or "test_of_best" not in self.result:
            return None
        return float(self.result["test_of_best"][self.result["metric"]])

    @property
    def text(self) -> str | None:
        """The key of the prepared text that a finished run was made with; None for other data."""
        return text_of(self.result)

    @property
    def device(self) -> str:
        """What the times of the run depend on most."""
        machine = self.config["machine"]
        return str(machine.get("gpu") or machine["device"])

    @property
    def shared_device(self) -> bool:
        """Whether other programs used the device meanwhile, so that the times of the run mean nothing."""
        return bool(self.config["machine"].get("shared"))

    @property
    def counted_in(self) -> str:
        """The unit of progress: ``step`` where the recipe counts in steps, otherwise ``epoch``."""
        training = self.config["run"]["training"]
        return "step" if training.get("steps") or training.get("evaluate_every") else "epoch"

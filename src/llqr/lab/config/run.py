"""One run, resolved: everything that decides it but its seed. It builds its own task, model and optimizer."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn

import llqr
from llqr.curvature.derivatives import ENGINES
from llqr.lab import tasks
from llqr.lab.config import settings
from llqr.lab.config.strict import make
from llqr.lab.errors import ConfigurationError
from llqr.lab.names import check_known
from llqr.lab.passes import repeated_blocks
from llqr.lab.tasks import Task


@dataclass(frozen=True)
class Run:
    """Two runs with equal fields are the same experiment."""

    task: settings.Choice
    data: settings.DataChoice
    model: settings.Choice
    training: settings.TrainingSettings
    schedule: settings.LrSchedule
    method: str
    base: settings.Base
    probe: settings.Probe | None
    geometry: settings.GeometrySettings | None
    transport: bool
    optimizer: settings.OptimizerSettings = field(default_factory=settings.OptimizerSettings)

    @classmethod
    def from_dict(cls, table: Mapping[str, Any], source: str) -> "Run":
        """The inverse of `to_dict`; errors name the file ``source``."""
        return make(cls, table, "run", source)

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts, as they are printed and logged, without what is not the recipe's to set."""
        table = dataclasses.asdict(self)
        if self.geometry is not None:
            for name in settings.SET_ELSEWHERE:
                del table["geometry"]["runtime"][name]
        return table

    def check(self, where: str) -> None:
        """Refuse names and options of task, data and model that do not exist, before any data is read."""
        check_known(f"{where}: task.name", self.task.name, tasks.TASKS)
        make(self.task_type.options, self.task.options, "task.options", where)
        try:
            data_options = self.task_type.data_options(self.data.name)
        except ValueError as error:
            raise ConfigurationError(f"{where}: data.name: {error}") from error
        make(data_options, self.data.options, "data.options", where)
        try:
            self.build_without_memory()
        except (TypeError, ValueError) as error:
            given = f"model.name = {self.model.name!r}, model.options = {self.model.options}"
            raise ConfigurationError(f"{where}: {given}: {error}") from error

    @property
    def task_type(self) -> type[Task]:
        found = tasks.TASKS[self.task.name]
        return resolve_name(found) if isinstance(found, str) else found

    @cached_property
    def task_options(self) -> Any:
        """The options of the task, in the type that the task declares."""
        return make(self.task_type.options, self.task.options, "task.options", self.task.name)

    @cached_property
    def data_options(self) -> Any:
        """The options of the data, in the type that the task declares for this data set."""
        options = self.task_type.data_options(self.data.name)
        return make(options, self.data.options, "data.options", self.data.name)

    @property
    def data_path(self) -> Path:
        return Path(self.data.root) / self.data.name

    def load_task(self, device: torch.device, seed: int = 0) -> Task:
        """The task with its data read; a `DataError` if they are missing or damaged."""
        return self.task_type.load(self, device, seed)

    def build_model(self) -> nn.Module:
        """The network for the complete data set, on the current default device."""
        return self.task_type.build_model(self)

    def build_without_memory(self) -> nn.Module:
        """The same network on the meta device, for its sizes."""
        with torch.device("meta"):
            return self.build_model()

    def build_optimizer(
        self,
        model: nn.Module,
        task: Task,
        *,
        capture: bool = False,
        compile: bool = False,
        on_refresh: Callable[[llqr.Refresh], None] | None = None,
    ) -> llqr.Optimizer:
        """The method of this run, put together from its components.

        With ``capture`` a refresh runs as captured CUDA graphs, unless it is computed in pieces; with ``compile`` it
        runs compiled, by one-sided differences where the network has repeated blocks. It has the precision of the
        training passes. ``on_refresh`` gets the report of every refresh.
        """
        geometry = None
        if self.geometry is not None:
            runtime = self._runtime(self.geometry.runtime, model, capture, compile)
            first_order = runtime.engine in ENGINES and not ENGINES[runtime.engine].exact
            # Differences need no derivative of the fast kernels that the training passes use.
            forward = task.forward if first_order else task.differentiable_forward
            geometry = self.geometry.build(model, task.loss, runtime=runtime, forward=forward, on_refresh=on_refresh)
        base, probe = self.base.build(model), None if self.probe is None else self.probe.build()
        return llqr.Optimizer(base, probe, geometry, transport=self.transport, model=model, **vars(self.optimizer))

    def passes_per_step(self, steps: int) -> float:
        """The mean over a run of so many steps: 1 without a probe, 2 with one in every step."""
        probe = None if self.probe is None else self.probe.build()
        return 1.0 if probe is None else 1 + sum(map(probe.active, range(steps))) / steps

    def _runtime(self, own: llqr.Runtime, model: nn.Module, capture: bool, compile: bool) -> llqr.Runtime:
        engine, whole = own.engine, own.micro_batch is None
        if engine == "auto" and compile and whole:
            # Differences run through the blocks that are compiled for the passes; a network without any is traced.
            engine = "one-sided-differences" if repeated_blocks(model) else "linearised"
        return dataclasses.replace(
            own,
            engine=engine,
            capture=capture and whole,
            compile=compile and engine == "linearised",
            autocast=torch.bfloat16 if self.training.precision == "bf16" else None,
        )

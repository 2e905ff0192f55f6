"""The training loop: one for all methods and all tasks.

A run is a sequence of intervals, each ended by an evaluation and a record in the log: epochs, unless the recipe asks
for evaluations by steps. Nothing in a step waits for the device: losses are summed where they are computed and read
once per interval. `Training.state_dict` holds everything that decides how a run continues, at any step of an epoch, so
that a run that was stopped and resumed ends where an uninterrupted one ends; on the CPU, bit-exactly.
"""

import math
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LambdaLR

from llqr import Geometry, Refresh, RefreshError
from llqr.lab.data import Batches
from llqr.lab.errors import CannotWrite, ConfigurationError, Diverged
from llqr.lab.number_table import spread
from llqr.lab.passes import CapturedPass, Pass, Precision, compile_network
from llqr.lab.progress import Display
from llqr.lab.runs.folder import RunFolder
from llqr.lab.runs.planned import PlannedRun
from llqr.lab.stop import Stop
from llqr.lab.tasks import Batch, Task
from llqr.lab.training import checkpoint
from llqr.lab.training.results import best_record, layer_effects, result_of


@dataclass(frozen=True)
class Execution:
    """How to carry out runs; not part of their configuration.

    With ``compile``, refreshes may use another engine, see `Run.build_optimizer`. With ``shared_device`` times mean
    nothing.
    """

    device: torch.device
    capture: bool = False
    compile: bool = False
    checkpoint_minutes: float = 5.0
    tensorboard: bool = False
    shared_device: bool = False


class Interval:
    """Sums over the steps since the last evaluation; the loss stays on the device until it is read."""

    def __init__(self, device: torch.device, first: int = 0) -> None:
        self.first = first  # the number of steps done before
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.mean_loss = math.nan
        self.count = 0
        self.seconds = 0.0
        self.refreshes: list[dict[str, Any]] = []


class Training:
    """A run in progress: model, optimizer and batches, and where they are."""

    def __init__(self, planned: PlannedRun, task: Task, execution: Execution) -> None:
        self.planned, self.task, self.execution = planned, task, execution
        run, device = planned.run, execution.device
        model_seed, order_seed, inner_seed = independent_seeds(planned.seed, 3)
        self.folder = RunFolder(planned.path)
        self.precision = Precision(run.training.precision, device)
        self.precision.set_up()
        torch.manual_seed(model_seed)
        random.seed(model_seed)
        np.random.seed(model_seed % 2**32)  # noqa: NPY002
        self.model = task.place(task.new_model(run)).train()
        self._reports: list[Refresh] = []  # of the refreshes since the last interval ended
        self.optimizer = run.build_optimizer(
            self.model, task, capture=execution.capture, compile=execution.compile, on_refresh=self._reports.append
        )
        self.batches = task.train_batches(run.training.batch_size, order_seed)
        # Its own loader: the size of an inner batch is free, and all methods see the same training batches.
        self.inner = None if run.geometry is None else task.inner_batches(run.geometry.batch_size, inner_seed)
        self._next_inner = None if self.inner is None else partial(next, endless(self.inner))
        self.total_steps = run.training.total_steps(len(self.batches))
        self.scheduler = LambdaLR(self.optimizer, lambda step: run.schedule.factor(step, self.total_steps))
        forward_model = compile_network(self.model) if execution.compile else self.model
        self.closure = (CapturedPass if execution.capture else Pass)(task, forward_model, self.precision)
        self.current = Interval(device)
        self.best: dict[str, Any] | None = None  # the weights of the best evaluation, for tasks that ask for them
        self.effects: dict[str, dict[str, float]] = {}

    # -- the loop ------------------------------------------------------------------------------------------------------

    def run(self, stop: Stop, display: Display) -> dict[str, Any] | None:
        """Train until the end or until asked to stop, and leave a checkpoint; return the result if this is the end."""
        board = None
        if self.execution.tensorboard:
            from llqr.lab.training.tensorboard import Board

            board = Board(self.folder.path, self.optimizer.steps)
        saved = time.monotonic()
        display.begin(self.planned.label, self.total_steps, self.optimizer.steps)
        while not self.finished:
            interval_ended = self.train_interval(stop, display)
            if interval_ended:
                record = self.evaluate_interval(display)
                if board is not None:
                    board.write(record)
            stopping = not interval_ended or stop.requested
            if stopping or self.finished or time.monotonic() - saved >= 60 * self.execution.checkpoint_minutes:
                self.save()
                saved = time.monotonic()
            if stopping and not self.finished:
                return None
        if board is not None:
            board.close()
        if self.best is not None:
            checkpoint.save(self.best, self.folder.best)
        return self.folder.finish(result_of(self))

    def train_interval(self, stop: Stop, display: Display) -> bool:
        """Train until the next evaluation; return False if asked to stop before."""
        started = time.perf_counter()
        current, end = self.current, self.next_evaluation
        for batch in endless(self.batches):
            self.step(batch)
            display.advance(self.optimizer.steps)
            if self.optimizer.steps == end or stop.requested:
                break
        current.mean_loss = current.loss.item() / (self.optimizer.steps - current.first)  # waits for the device
        current.seconds += time.perf_counter() - started
        current.refreshes += [asdict(report) for report in self._reports]
        self._reports.clear()
        return self.optimizer.steps == end

    def step(self, batch: Batch) -> None:
        """One step of the optimizer and of the learning rate."""
        self.closure.load(batch)
        try:
            self.current.loss += self.optimizer.step(self.closure, batch=self._next_inner)
        except RefreshError as error:
            raise Diverged(f"{self.planned.label}: {error}.") from error
        self.scheduler.step()
        self.current.count += self.task.size(batch)

    def evaluate_interval(self, display: Display) -> dict[str, Any]:
        """Evaluate, and log what happened since the last evaluation."""
        current, task = self.current, self.task
        self._check_finite("training loss", current.mean_loss)
        started = time.perf_counter()
        found = self.measure(task.split)
        self._check_finite(f"{task.split} {task.metric}", found[task.metric])
        record = {
            "epoch": self.epochs,
            "step": self.optimizer.steps,
            "lr": self.planned.run.base.lr * self.planned.run.schedule.factor(current.first, self.total_steps),
            "train": {"loss": current.mean_loss},
            task.split: found,
            "seconds": {
                "train": current.seconds,
                "eval": time.perf_counter() - started,
                "refresh": sum(report["seconds"] for report in current.refreshes),
            },
            "rate": current.count / current.seconds,
            "refreshes": current.refreshes,
        }
        self.current = Interval(self.execution.device, self.optimizer.steps)
        self.folder.log.append(record)
        records = self.folder.log.records
        if task.split == "valid" and best_record(records, task) is records[-1]:
            weights = checkpoint.to_host(self.model.state_dict())
            self.best = {"step": self.optimizer.steps, "model": weights, "data": task.data_key}
        display.evaluated(self._position, f"{task.metric} {spread(found[task.metric])}", current.mean_loss)
        return record

    def measure(self, split: str) -> dict[str, float]:
        """Compute the metrics of the current weights, in eval mode."""
        self.model.eval()
        try:
            with torch.no_grad(), self.precision.autocast():
                return self.task.measure(self.model, split)
        finally:
            self.model.train()

    def test(self) -> dict[str, float]:
        """Compute the test metrics of the best weights; then restore the current ones."""
        assert self.best is not None
        current = checkpoint.to_host(self.model.state_dict())
        self.model.load_state_dict(self.best["model"])
        try:
            return self.measure("test")
        finally:
            self.model.load_state_dict(current)

    # -- where it is ---------------------------------------------------------------------------------------------------

    @property
    def geometry(self) -> Geometry | None:
        geometry = self.optimizer.geometry
        assert geometry is None or isinstance(geometry, Geometry)
        return geometry

    @property
    def epochs(self) -> float:
        """How many are done: a whole number at the end of an epoch."""
        whole, rest = divmod(self.optimizer.steps, len(self.batches))
        return whole + rest / len(self.batches) if rest else whole

    @property
    def finished(self) -> bool:
        return self.optimizer.steps == self.total_steps

    @property
    def next_evaluation(self) -> int:
        """The step at which the current interval ends."""
        between = self.planned.run.training.evaluate_every or len(self.batches)
        return min(self.total_steps, self.current.first + between)

    @property
    def _position(self) -> str:
        return f"epoch {self.epochs}" if isinstance(self.epochs, int) else f"step {self.optimizer.steps}"

    def _check_finite(self, what: str, value: float) -> None:
        if not math.isfinite(value):
            raise Diverged(f"{self.planned.label}: the {what} of {self._position} is {value}.")

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save(self) -> None:
        checkpoint.save(self.state_dict(), self.folder.checkpoint)

    def resume(self) -> None:
        """Continue from the folder's checkpoint, if it has one."""
        if not self.folder.checkpoint.exists():
            self.folder.log.restore([])
            return
        state = checkpoint.load(self.folder.checkpoint, self.execution.device)
        try:
            self.load_state_dict(state)
        except CannotWrite:  # about the log, not about the state
            raise
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ConfigurationError(f"--out: {self.folder.checkpoint} does not fit this run: {reason}") from error

    def state_dict(self) -> dict[str, Any]:
        self.effects = layer_effects(self.geometry) or self.effects
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "batches": self.batches.state_dict(),
            "inner": None if self.inner is None else self.inner.state_dict(),
            "current": vars(self.current),
            "best": self.best,
            "layer_effects": self.effects,
            "log": self.folder.log.records,
            "data": self.task.data_key,
            "random": checkpoint.random_state(self.execution.device),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["data"] != self.task.data_key:
            raise ValueError(f"it was trained on {state['data']}, and the data are now {self.task.data_key}.")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.batches.load_state_dict(state["batches"])
        if self.inner is not None:
            self.inner.load_state_dict(state["inner"])
        self.best = state["best"]
        self.effects = state["layer_effects"]
        vars(self.current).update(state["current"])
        self.folder.log.restore(state["log"])
        checkpoint.set_random_state(state["random"], self.execution.device)


def endless(batches: Batches) -> Iterator[Batch]:
    while True:
        yield from batches


def independent_seeds(seed: int, count: int) -> list[int]:
    """Seeds for the independent random streams of one run."""
    return [int(child.generate_state(1)[0]) for child in np.random.SeedSequence(seed).spawn(count)]

"""The training loop: one for all methods and all tasks.

Nothing in a step waits for the device: losses are summed where they are made and read once an epoch. Everything that
decides how a run goes on is in `Training.state_dict`, at any step of an epoch, so that a run that was stopped and
resumed ends where an uninterrupted one ends; on the CPU, bit by bit.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LambdaLR

from llqr import RefreshError
from llqr.lab import checkpoint, spectrum
from llqr.lab.capture import Pass, RecordedPass
from llqr.lab.data import Batches
from llqr.lab.errors import Diverged
from llqr.lab.method import ObservedGeometry, lr_factor, optimizer_for
from llqr.lab.precision import Precision
from llqr.lab.progress import Display
from llqr.lab.runs import Plan, RunFolder
from llqr.lab.stop import Stop
from llqr.lab.strict import ConfigurationError
from llqr.lab.tasks import Batch, Task
from llqr.lab.tensorboard import Board


@dataclass(frozen=True)
class Execution:
    """How runs are carried out; none of it decides what they compute."""

    device: torch.device
    capture: bool = False
    compile: bool = False
    checkpoint_minutes: float = 5.0
    tensorboard: bool = False


class Training:
    """A run in progress."""

    def __init__(self, plan: Plan, task: Task, execution: Execution) -> None:
        self.plan, self.task, self.execution = plan, task, execution
        run, device = plan.run, execution.device
        model_seed, order_seed, inner_seed = independent_seeds(plan.seed, 3)
        self.folder = RunFolder(plan.folder)
        self.precision = Precision(run.training.precision, device)
        self.precision.set_up()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        torch.manual_seed(model_seed)
        self.model = task.place(plan.recipe.build_model()).train()
        self.optimizer = optimizer_for(run, self.model, task, capture=execution.capture)
        self.batches = task.train_batches(run.training.batch_size, order_seed)
        # A loader of its own: the size of an inner batch is free, and all methods see the same training batches.
        self.inner = None if run.geometry is None else InnerBatches(task, run.geometry.batch_size, inner_seed)
        self.total_steps = run.training.epochs * len(self.batches)
        self.scheduler = LambdaLR(self.optimizer, lambda step: lr_factor(run.schedule, step, self.total_steps))
        # The metric is learned from the plain model, whose derivatives of higher order exist.
        passing = torch.compile(self.model) if execution.compile else self.model
        self.closure = (RecordedPass if execution.capture else Pass)(task, passing, self.precision)
        self.epoch = 0  # how many are finished
        self.current = EpochSoFar(device)
        self.board: Board | None = None

    @property
    def geometry(self) -> ObservedGeometry | None:
        return self.optimizer.geometry

    @property
    def finished(self) -> bool:
        return self.epoch == self.plan.run.training.epochs

    # -- the loop ------------------------------------------------------------------------------------------------------

    def run(self, stop: Stop, display: Display) -> bool:
        """Go on until the end or until asked to stop, with a checkpoint left either way; whether it is the end."""
        self.board = Board(self.folder.path, self.epoch) if self.execution.tensorboard else None
        saved = time.monotonic()
        display.begin(self.plan.label, self.total_steps, self.optimizer.steps)
        while not self.finished:
            if not self._train(stop, display):
                self.save()
                return False
            self._close_epoch(display)
            minutes = (time.monotonic() - saved) / 60
            if self.finished or stop.requested or minutes >= self.execution.checkpoint_minutes:
                self.save()
                saved = time.monotonic()
            if stop.requested and not self.finished:
                return False
        if self.board is not None:
            self.board.close()
        self.folder.finish(self.result())
        return True

    def _train(self, stop: Stop, display: Display) -> bool:
        """The rest of the current epoch; False if it was asked to stop before its end."""
        started = time.perf_counter()
        current, last = self.current, len(self.batches)
        inner = None if self.inner is None else self.inner.next
        for batch in self.batches:
            self.closure.load(batch)
            try:
                current.loss += self.optimizer.step(self.closure, batch=inner)
            except RefreshError as error:
                raise Diverged(f"{self.plan.label}: {error}.") from error
            self.scheduler.step()
            current.count += self.task.size(batch)
            display.advance(self.optimizer.steps)
            if stop.requested and self.batches.position < last:
                break
        current.mean_loss = current.loss.item() / self.batches.position  # waits for the device
        current.seconds += time.perf_counter() - started
        if self.geometry is not None:
            current.refreshes += [asdict(report) for report in self.geometry.collect()]
        return self.batches.position == last

    def _close_epoch(self, display: Display) -> None:
        """Evaluate, and write the epoch down."""
        current, self.current = self.current, EpochSoFar(self.execution.device)
        self.epoch += 1
        if not math.isfinite(current.mean_loss):
            raise Diverged(f"{self.plan.label}: the training loss of epoch {self.epoch} is {current.mean_loss}.")
        started = time.perf_counter()
        test = self.evaluate()
        record = {
            "epoch": self.epoch,
            "step": self.optimizer.steps,
            "lr": self.learning_rate((self.epoch - 1) * len(self.batches)),
            "train": {"loss": current.mean_loss},
            "test": test,
            "seconds": {
                "train": current.seconds,
                "eval": time.perf_counter() - started,
                "refresh": sum(report["seconds"] for report in current.refreshes),
            },
            "rate": current.count / current.seconds,
            "refreshes": current.refreshes,
            "spectrum": spectrum.summary(self.geometry) if self.geometry is not None else None,
        }
        self.folder.log.append(record)
        if self.board is not None:
            self.board.write(record)
        display.epoch(self.epoch, f"{self.task.metric} {test[self.task.metric]:.2f}", current.mean_loss)

    def evaluate(self) -> dict[str, float]:
        """The test metrics of the current weights."""
        self.model.eval()
        try:
            with torch.no_grad(), self.precision.autocast():
                return self.task.evaluate(self.model)
        finally:
            self.model.train()

    def learning_rate(self, step: int) -> float:
        """Of the base optimizer, at a step of the whole run."""
        return self.plan.run.base.lr * lr_factor(self.plan.run.schedule, step, self.total_steps)

    # -- what is left behind -------------------------------------------------------------------------------------------

    def result(self) -> dict[str, Any]:
        """The summary of a finished run."""
        run, task, records = self.plan.run, self.task, self.folder.log.records
        best = records[0]
        for record in records:
            if task.better(record["test"][task.metric], best["test"][task.metric]):
                best = record
        refreshes = [report for record in records for report in record["refreshes"]]
        seconds = {part: sum(record["seconds"][part] for record in records) for part in ("train", "eval", "refresh")}
        # The first epoch pays for choosing kernels and recording graphs. The mean, because not every epoch refreshes.
        typical = records[1:] or records
        return {
            "recipe": self.plan.name,
            "title": self.plan.recipe.title,
            "task": run.task.name,
            "data": run.data.name,
            "model": run.model.name,
            "method": run.method,
            "seed": self.plan.seed,
            "metric": task.metric,
            "larger_is_better": task.larger_is_better,
            "best": best["test"][task.metric],
            "best_epoch": best["epoch"],
            "last": records[-1]["test"][task.metric],
            "test": records[-1]["test"],
            "epochs": self.epoch,
            "steps": self.optimizer.steps,
            "seconds": seconds | {"total": seconds["train"] + seconds["eval"]},
            "epoch_seconds": fmean(record["seconds"]["train"] for record in typical),
            "rate": fmean(record["rate"] for record in typical),
            "unit": task.unit,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "metric_bytes": 0 if self.geometry is None else self.geometry.memory()["allocated"],
            "refreshes": len(refreshes),
            "refreshes_rejected": sum(not report["accepted"] for report in refreshes),
            "device_peak_bytes": self._peak_bytes(),
            "layers": None if self.geometry is None else spectrum.layer_means(self.geometry),
        }

    def _peak_bytes(self) -> int | None:
        device = self.execution.device
        return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None

    def save(self) -> None:
        checkpoint.save(self.state_dict(), self.folder.checkpoint)

    def resume(self) -> None:
        """Go on from the folder's checkpoint, if it has one."""
        if not self.folder.checkpoint.exists():
            self.folder.log.restore([])
            return
        state = checkpoint.load(self.folder.checkpoint, self.execution.device)
        try:
            self.load_state_dict(state)
        except (KeyError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ConfigurationError(f"--out: {self.folder.checkpoint} does not fit this run: {reason}") from error

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "batches": self.batches.state_dict(),
            "inner": None if self.inner is None else self.inner.batches.state_dict(),
            "epoch": self.epoch,
            "current": vars(self.current),
            "log": self.folder.log.records,
            "random": checkpoint.random_state(self.execution.device),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.batches.load_state_dict(state["batches"])
        if self.inner is not None:
            self.inner.batches.load_state_dict(state["inner"])
        self.epoch = state["epoch"]
        vars(self.current).update(state["current"])
        self.folder.log.restore(state["log"])
        checkpoint.set_random_state(state["random"], self.execution.device)


class EpochSoFar:
    """Sums over the steps of the epoch that is under way; the loss stays on the device until it is asked for."""

    def __init__(self, device: torch.device) -> None:
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.mean_loss = math.nan
        self.count = 0
        self.seconds = 0.0
        self.refreshes: list[dict[str, Any]] = []


class InnerBatches:
    """What the metric is learned from: one batch a refresh, epoch after epoch of a loader of its own."""

    def __init__(self, task: Task, batch_size: int, seed: int) -> None:
        self.batches: Batches = task.train_batches(batch_size, seed)
        self._rest: Iterator[Batch] = iter(())

    def next(self) -> Batch:
        for batch in self._rest:
            return batch
        self._rest = iter(self.batches)
        return next(self._rest)


def independent_seeds(seed: int, count: int) -> list[int]:
    """Seeds for unrelated purposes of one run, which must not draw the same numbers."""
    return [int(child.generate_state(1)[0]) for child in np.random.SeedSequence(seed).spawn(count)]

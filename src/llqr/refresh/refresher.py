"""Runs the inner loops of refreshes: at once or spread over steps, eager or as CUDA graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from llqr.curvature import Problem, QuadraticModel
from llqr.curvature.batch import Batch, opened, split_batch
from llqr.refresh.captured import CapturedLoop
from llqr.refresh.inner_loop import InnerLoop, InnerProblem, Loop
from llqr.refresh.progress import Progress

RECOMPUTED_LATER = (
    "spread: the model computes activations again in its backward pass (torch.utils.checkpoint), at the weights it has "
    "by then, not at the copies that a spread refresh learns at; leave spread out, or checkpoint only in training mode"
)


class Linearises(Protocol):
    """What a refresh needs of a linearizer."""

    def problem(self, batch: Batch) -> Problem: ...
    def linearise(self, problem: Problem) -> QuadraticModel: ...


class Refresher:
    """Makes the inner steps that a refresh owes by a step, and keeps what it needs between two of them.

    Attributes:
        spread: share the inner steps of a refresh among optimizer steps.
        progress: the spread refresh that is under way.
    """

    def __init__(self, inner: InnerProblem, linearizer: Linearises, *, capture: bool, spread: bool) -> None:
        self.spread = spread
        self.progress: Progress | None = None
        self._inner = inner
        self._linearizer = linearizer
        self._capture = capture and inner.metric.stored() > 0
        self._captured: CapturedLoop | None = None
        # Copies for a spread refresh, which stay where they are: kept graphs and captured ones read them there.
        self._weights: list[Tensor] | None = None

    def begin(self, batch: Batch | Callable[[], Batch], step: int, until: int) -> Progress:
        """Begin a refresh over these optimizer steps and drop one under way; a spread one copies batch and weights."""
        started = time.perf_counter()
        self.release()
        drawn = batch() if callable(batch) else batch
        split = split_batch(drawn)  # refuses what is no batch here, where other ranks do not wait for this one yet
        if self._capture or self.spread:
            drawn = opened(split)
        if self.spread:
            drawn = pytree.tree_map_only(Tensor, torch.clone, drawn)
            self._copy_weights(self._linearizer.problem(drawn))
        return Progress(step, until, drawn, seconds=time.perf_counter() - started)

    def advance(self, progress: Progress, step: int) -> Loop | None:
        """Make the inner steps owed before this optimizer step; returns the loop once all of its steps are done."""
        started = time.perf_counter()
        try:
            loop = progress.loop = progress.loop or self._loop(progress)
            while not progress.up_to_date(step):
                loop.advance()
            return loop if loop.done == len(loop.plan) else None
        except BaseException:
            progress.loop = None  # half of a step may be done: a retry repeats them all, which gives the same factors
            raise
        finally:
            progress.seconds += time.perf_counter() - started

    def loop_on(self, quadratic: QuadraticModel, step: int) -> InnerLoop:
        """An eager loop on a quadratic model that is given."""
        return InnerLoop(self._inner, quadratic, step)

    def linearise(self, batch: Batch) -> QuadraticModel:
        problem = self._linearizer.problem(batch)
        if self._weights is None:
            return self._linearizer.linearise(problem)
        try:
            with torch.autograd.graph.disable_saved_tensors_hooks(RECOMPUTED_LATER):
                return self._linearizer.linearise(problem.at(self._weights))
        except RuntimeError as error:
            if RECOMPUTED_LATER in str(error):
                raise RuntimeError(RECOMPUTED_LATER) from error
            raise

    def _loop(self, progress: Progress) -> Loop:
        if not self._capture:
            return self.loop_on(self.linearise(progress.batch), progress.step)
        if self._captured is None or not self._captured.fits(progress.batch):
            self._captured = None  # frees the old graphs before new ones are captured
            self._captured = CapturedLoop(self._inner, self.linearise, progress.batch, progress.step)
        self._captured.begin(progress.batch, progress.step)
        return self._captured

    def _copy_weights(self, problem: Problem) -> None:
        if self._capture and self._weights is not None:
            torch._foreach_copy_(self._weights, problem.weights())
        else:
            self._weights = [tensor.clone() for tensor in problem.weights()]

    def release(self) -> None:
        """Drop the refresh under way and free what it holds; captured graphs keep their copies of the weights."""
        self.progress = None
        if not self._capture:
            self._weights = None

    def state(self) -> dict[str, Any] | None:
        """A spread refresh under way, None without one."""
        if self.progress is None or self._weights is None:
            return None
        return self.progress.state() | {"weights": [tensor.clone() for tensor in self._weights]}

    def restored(self, state: Mapping[str, Any] | None, device: torch.device) -> Callable[[], None]:
        """Checks a saved state, and returns what puts it in place: nothing changes before that."""
        if state is None:
            return self.release
        if not self.spread:
            raise ValueError("state_dict: saved in the middle of a refresh, which needs spread=True to be finished")
        progress = Progress.of(state, device)
        problem = self._linearizer.problem(progress.batch)
        saved, mine = state["weights"], problem.weights()
        if [tensor.shape for tensor in saved] != [tensor.shape for tensor in mine]:
            raise ValueError("state_dict: saved in the middle of a refresh of a model with other parameters or buffers")
        weights = [tensor.to(own) for tensor, own in zip(saved, mine, strict=True)]

        def restore() -> None:
            self.release()
            self.progress = progress
            self._copy_weights(problem.at(weights))

        return restore

    def __getstate__(self) -> dict[str, Any]:
        """Without CUDA graphs, which cannot be copied and are captured again."""
        return self.__dict__ | {"_captured": None}

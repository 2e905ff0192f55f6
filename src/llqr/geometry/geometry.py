"""What a user holds: the metric, the curvature it is learned from, and when."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from llqr.curvature import (
    LINEARISED,
    Batch,
    Curvature,
    Divergence,
    Forward,
    Loss,
    Problem,
    QuadraticModel,
    RankAverage,
    Trace,
    choose_engine,
    divergence_named,
    frozen,
    several_ranks,
)
from llqr.curvature.divergence import Scale, check_scale
from llqr.curvature.engines import ENGINES
from llqr.geometry.fixed import FixedGeometry
from llqr.metric import Metric, StructureSpec
from llqr.metric.captured import CapturedMetric
from llqr.metric.layout import MAX_SIDE
from llqr.metric.structure import Bounds, Factors
from llqr.refresh.captured import CapturedRefresh
from llqr.refresh.guards import Findings, examine, objection
from llqr.refresh.progress import Loop, Progress, Standstill, at_saved, copied
from llqr.refresh.report import Refresh, RefreshError, RefreshWarning
from llqr.schedule import Schedule, at, check
from llqr.solvers.objective import PRECISIONS
from llqr.solvers.solve import SOLVERS, Descent, Inner, InnerLoop

__all__ = ["FixedGeometry", "Geometry", "GeometryLike", "Refresh", "RefreshError", "RefreshWarning", "unwrapped"]


class GeometryLike(Protocol):
    """What the optimizer needs of a geometry."""

    @property
    def due(self) -> bool: ...
    @property
    def model(self) -> nn.Module | None: ...
    def keep_up(self, batch: Any) -> None: ...
    def advance(self) -> None: ...
    def transport(self, parameters: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Geometry:
    """A learned inverse metric `U` with its curvature and its schedule.

    Args:
        model: the network; `torch.compile`d and DDP-wrapped models are seen through.
        loss_fn: `loss_fn(outputs, targets)` -> mean loss.
        structure: "diagonal", "scalar", "kfac", "e-kfac", "diag-kfac", "dense", "kfac-psd", "e-kfac-psd", "identity",
            or patterns -> names.
        divergence: "ngd" (Fisher / Gauss-Newton), "newton", or a `Divergence`.
        every: steps between refreshes (the first comes before step 0).
        ema: `beta` of the moving average (default: the divergence's, 0.95 for ngd and 0.9 for newton).
        lr, steps, product_every, solver, momentum, clip, damping: the inner loop, see `llqr.Inner`.
        curvature_scale: "sum", "mean" or a number that multiplies the curvature of the mean loss (default: the
            divergence's, "sum" for ngd, where the curvature weighs the inner batch size times the linear term).
        engine: "auto", "forward", "linearised", "double-backward", "finite-differences" or "one-sided-differences".
        compile: hand the traced product (of engine="linearised"), and the inner loop's steps on large stacks of
            matrices, to `torch.compile`.
        forward: `forward(model, inputs)` -> outputs, for models that are not called as `model(inputs)`.
        micro_batch: compute a refresh in pieces of this many samples, with the same result and less memory.
        autocast: run the refresh under autocast of this dtype (default: full precision, whatever the caller's context);
            the factors' matrix products too, unless it is float16, which is too narrow for gradients.
        bounds, dtype, apply_dtype, max_side: of the metric, see `llqr.Metric`.
        max_failures: refreshes thrown away in a row before an error.
        capture: replay the refresh, and the matrix products of `U g`, as CUDA graphs: the host then launches little.
            Needs a CUDA model and batches of one shape, and keeps the memory of both, with a copy of the factors; a
            `U g` is overwritten by the next one.
        spread: learn a little at every optimizer step, so that none is long: a refresh that falls due is linearised at
            once, at a copy of the weights and buffers, and its products are shared evenly among the steps until the
            next one is due, when `U` changes. Until the first is finished `U` is the identity. Activations of the inner
            batch, and the copies, stay in memory between the steps.

    `every`, `ema` and `lr` may be functions of the step.

    Example:
        >>> model = nn.Linear(4, 3)
        >>> geometry = Geometry(model, nn.functional.cross_entropy, structure="kfac", every=500)
        >>> batch = torch.randn(8, 4), torch.randint(3, (8,))
        >>> geometry.due, geometry.refresh(batch).accepted, geometry.due
        (True, True, False)
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Loss,
        *,
        structure: StructureSpec = "diagonal",
        divergence: str | Divergence = "ngd",
        every: Schedule = 500,
        ema: Schedule | None = None,
        lr: Schedule = 1e-3,
        steps: int = 50,
        product_every: int = 1,
        solver: str = "heavy-ball",
        momentum: float = 0.9,
        clip: float = 5.0,
        damping: float = 0.0,
        curvature_scale: Scale | None = None,
        engine: str = "auto",
        compile: bool = False,
        forward: Forward | None = None,
        micro_batch: int | None = None,
        autocast: torch.dtype | None = None,
        bounds: Bounds = None,
        dtype: torch.dtype | None = None,
        apply_dtype: torch.dtype | None = None,
        max_side: int = MAX_SIDE,
        max_failures: int = 10,
        capture: bool = False,
        spread: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
        if not callable(loss_fn):
            raise TypeError(f"loss_fn: expected a function of outputs and targets, got {type(loss_fn).__name__}")
        self.divergence = divergence_named(divergence)
        ema = self.divergence.ema if ema is None else ema
        check("every", every, 1)
        check("ema", ema, 0, 1)
        check("lr", lr, 0)
        self.model: nn.Module = unwrapped(model)
        self.loss_fn = loss_fn
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise ValueError("model: no parameter requires a gradient")
        for name, parameter in self.parameters.items():
            if parameter.is_complex():
                raise ValueError(f"model: parameter {name!r} is complex, which a metric does not support")
        if engine not in ("auto", LINEARISED, *ENGINES):
            raise ValueError(f"engine: unknown {engine!r}; choose auto or one of {', '.join([LINEARISED, *ENGINES])}")
        if micro_batch is not None and engine == LINEARISED:
            raise ValueError("micro_batch: not with a traced product, which keeps a whole batch's activations")
        check_scale(curvature_scale)
        self.metric = Metric(
            self.model,
            self.parameters,
            structure,
            bounds=bounds,
            dtype=dtype,
            apply_dtype=apply_dtype,
            max_side=max_side,
        )
        self.engine = engine
        self.refreshes = 0
        self.failures = 0
        self._inner = Inner(solver, steps, 0.0, momentum, clip, damping, product_every, compile)
        self._every, self._ema, self._lr = every, ema, lr
        self._scale = curvature_scale
        self._forward, self._micro_batch, self._autocast = forward, micro_batch, autocast
        # Autocast leaves float64 alone.
        narrow = all(parameter.dtype.itemsize <= 4 for parameter in self.parameters.values())
        self._precision = autocast if narrow and autocast in PRECISIONS else None
        self._max_failures = max_failures
        self._trace: Trace | None = None
        self._capture = capture
        self._captured: CapturedRefresh | None = None
        self._acting = CapturedMetric(self.metric) if capture else self.metric
        if capture:
            self._check_capturable()
        self._spread = spread
        self._still: Standstill | None = None
        self._progress: Progress | None = None
        self._failures_in_a_row = 0
        self._step = 0
        self._next = 0
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in self.parameters.items()}

    def _check_capturable(self) -> None:
        if self._micro_batch is not None:
            raise ValueError("capture: not with micro_batch")
        if SOLVERS[self._inner.solver] is not Descent:
            raise ValueError(f"capture: not with solver={self._inner.solver!r}, whose steps are not all the same")
        if not all(parameter.is_cuda for parameter in self.parameters.values()):
            raise ValueError("capture: CUDA graphs need every parameter on a CUDA device")

    @property
    def due(self) -> bool:
        """Whether a refresh begins at the next optimizer step, which then needs a batch."""
        return self._step >= self._next

    def advance(self) -> None:
        """One optimizer step is done."""
        self._step += 1

    def memory(self) -> dict[str, int]:
        """Bytes of the factors per structure, planned and allocated."""
        return self.metric.memory()

    # -- learning ----------------------------------------------------------------------------------------------------

    def refresh(self, batch: Batch | Callable[[], Batch]) -> Refresh:
        """Learn `U` on one batch, all at once, and say what happened. On a numerical failure the old metric stays.

        A refresh in progress is dropped for it.
        """
        progress = self._begin(batch)
        report = self._work(progress, progress.until)
        assert report is not None
        return report

    def keep_up(self, batch: Any) -> None:
        """Do what the next optimizer step owes: a whole refresh when one is due, or its share of one that is spread."""
        if self._progress is not None:
            self._work(self._progress, self._step)
        if not self.due:
            return
        if not self._spread:
            self.refresh(batch)
            return
        progress = self._begin(batch)
        if self._work(progress, self._step) is None:
            self._progress, self._next = progress, progress.until

    def finished(self, report: Refresh) -> None:
        """Called with the report of every refresh, for subclasses that keep them."""

    def _begin(self, batch: Batch | Callable[[], Batch]) -> Progress:
        started = time.perf_counter()
        self._check_place()
        self._let_go()
        step = self._step
        with self._aside():
            drawn = batch() if callable(batch) else batch
            if self._spread:
                drawn = copied(drawn)
                self._stand_still(self._problem(drawn))
        until = step + max(1, round(at(self._every, step)))
        return Progress(step, until, drawn, seconds=time.perf_counter() - started)

    def _work(self, progress: Progress, step: int) -> Refresh | None:
        """The inner steps that have to be done before this one; the report, if they were the last."""
        started = time.perf_counter()
        blended: list[Factors] = []
        try:
            if progress.up_to_date(step):
                return None
            with self._aside():
                loop = progress.loop = progress.loop or self._loop(progress)
                while not progress.up_to_date(step):
                    loop.advance()
                if loop.done < loop.total:
                    return None
                solution = loop.solution()
                blended = self.metric.blend(solution.factors, at(self._ema, progress.step))
                found = examine(self.metric, loop.curvature, solution, blended)
                reason = objection(found)
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
            found, reason = Findings(), f"a decomposition failed ({error})"
        finally:
            progress.seconds += time.perf_counter() - started
        if not reason:
            self.metric.assign(blended)
        return self._finish(progress, found, reason)

    def _finish(self, progress: Progress, found: Findings, reason: str) -> Refresh:
        self._let_go()
        self._next = progress.until
        self.refreshes += 1
        self.failures += bool(reason)
        self._failures_in_a_row = self._failures_in_a_row + 1 if reason else 0
        report = Refresh(
            step=progress.step,
            accepted=not reason,
            reason=reason,
            objective_before=found.before,
            objective_after=found.after,
            loss=found.loss,
            gradient_norm=found.gradient_norm,
            engine=self.engine,
            seconds=progress.seconds,
        )
        self.finished(report)
        if reason:
            self._complain(report)
        return report

    def _let_go(self) -> None:
        """Free what a refresh in progress holds; captured graphs go on reading the copies where they are."""
        self._progress = None
        if not self._capture:
            self._still = None

    def _complain(self, report: Refresh) -> None:
        message = f"refresh at step {report.step}: kept the old metric, because {report.reason}"
        if self.failures == 1:
            warnings.warn(message + " (said once; see Geometry.failures)", RefreshWarning, stacklevel=5)
        if self._failures_in_a_row >= self._max_failures:
            raise RefreshError(f"{message}; {self._failures_in_a_row} in a row (max_failures={self._max_failures})")

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """The model is left as it was, and the caller's precision outside."""
        device = self.metric.blocks[0].device
        with frozen(self.model, device), torch.no_grad(), torch.autocast(device.type, enabled=False):
            yield

    def _check_place(self) -> None:
        """The factors live where the parameters were when the geometry was made."""
        for block in self.metric.blocks:
            parameter = self.parameters[block.parameter]
            if (parameter.device, parameter.dtype) != (block.device, block.dtype):
                raise RuntimeError(
                    f"model: {block.parameter!r} moved from {block.device}, {block.dtype} to {parameter.device}, "
                    f"{parameter.dtype}; make the geometry after moving the model"
                )

    def _loop(self, progress: Progress) -> Loop:
        inner, batch = replace(self._inner, lr=at(self._lr, progress.step)), progress.batch
        if not self._capture or not self.metric.stored():
            return InnerLoop(self.metric, self._linearise(batch), inner, self._precision)
        if self._captured is None or not self._captured.fits(batch, inner):
            self._captured = None  # frees the old graphs before the new ones are made
            self._captured = CapturedRefresh(self._linearise, batch, self.metric, inner, self._precision)
        self._captured.begin(batch)
        return self._captured

    def _stand_still(self, problem: Problem) -> None:
        if self._capture and self._still is not None:
            self._still.refill(problem)
        else:
            self._still = Standstill(problem)

    def _linearise(self, batch: Batch) -> QuadraticModel:
        problem = self._problem(batch)
        if self._still is not None:
            problem = self._still.hold(problem)
        curvature = self._traced(problem) if self.engine == LINEARISED else self._untraced(problem)
        return RankAverage(curvature) if several_ranks() else curvature

    def _problem(self, batch: Batch) -> Problem:
        return Problem(
            self.model,
            self.loss_fn,
            batch,
            self.parameters,
            forward=self._forward,
            micro_batch=self._micro_batch,
            autocast=self._autocast,
        )

    def _traced(self, problem: Problem) -> QuadraticModel:
        if self._trace is None or not self._trace.fits(problem):
            self._trace = Trace(problem, self.divergence, self._scale, compile=self._inner.compile)
        return self._trace.linearise(problem)

    def _untraced(self, problem: Problem) -> QuadraticModel:
        engine, refused = choose_engine(problem, self.divergence, self.engine)
        if self.engine == "auto" and engine.name == "finite-differences":
            warnings.warn(
                f"engine: chose finite-differences, which is approximate, because {'; '.join(refused)}",
                RefreshWarning,
                stacklevel=6,
            )
        self.engine = engine.name
        return Curvature(problem, self.divergence, engine, self._scale)

    # -- use -----------------------------------------------------------------------------------------------------------

    def transport(self, parameters: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
        """`U g` for gradients that stand beside their parameters; parameters of other models pass unchanged."""
        if not self.metric.learned:
            return list(grads)
        names = [self._names.get(parameter) for parameter in parameters]
        known = {name: g for name, g in zip(names, grads, strict=True) if name is not None}
        moved = self._acting.apply(known)
        return [g if name is None else moved[name] for name, g in zip(names, grads, strict=True)]

    def __getstate__(self) -> dict[str, Any]:
        """Without the graphs of a refresh, which cannot be copied and are recorded again."""
        return self.__dict__ | {"_captured": None}

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs to go on bit by bit."""
        counters = {key: getattr(self, key) for key in _COUNTERS}
        refresh = None
        if self._progress is not None and self._still is not None:
            refresh = self._progress.state() | {"standing_at": self._still.state()}
        return {"metric": self.metric.state_dict(), "engine": self.engine, "counters": counters, "refresh": refresh}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """In the middle of a refresh its products so far are made again, at the next optimizer step."""
        refresh = state.get("refresh")
        if refresh is not None and not self._spread:
            raise ValueError("state_dict: saved in the middle of a refresh, which needs spread=True to be finished")
        progress = problem = None
        if refresh is not None:
            progress = Progress.of(refresh, self.metric.blocks[0].device)
            problem = at_saved(self._problem(progress.batch), refresh["standing_at"])
        self.metric.load_state_dict(state["metric"])
        self._let_go()
        if problem is not None:
            self._progress = progress
            self._stand_still(problem)
        self.engine = state["engine"]
        for key in _COUNTERS:
            setattr(self, key, int(state["counters"][key]))


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside `torch.compile` and (Distributed)DataParallel, with the plain names and derivatives."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


_COUNTERS = ("refreshes", "failures", "_failures_in_a_row", "_step", "_next")

"""What a user holds: the metric, the curvature it is learned from, and when."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .captured import CapturedRefresh
from .curvature import (
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
from .curvature.divergence import Scale, check_scale
from .curvature.engines import ENGINES
from .metric import Metric, StructureSpec
from .metric.layout import MAX_SIDE
from .metric.structure import Bounds, Factors
from .schedule import Schedule, at, check
from .solve import Inner, Solution, solve


class RefreshError(RuntimeError):
    """Too many refreshes in a row had to be thrown away."""


class RefreshWarning(UserWarning):
    """A refresh was thrown away, or computed with an approximate engine."""


@dataclass(frozen=True)
class Refresh:
    """What happened in one refresh; `reason` says why the old metric was kept, and is empty when it was not.

    Example:
        >>> geometry = Geometry(nn.Linear(4, 3), nn.functional.cross_entropy)
        >>> report = geometry.refresh((torch.randn(8, 4), torch.randint(3, (8,))))
        >>> report.accepted, report.reason, report.objective_after < report.objective_before
        (True, '', True)
    """

    step: int
    accepted: bool
    reason: str
    objective_before: float
    objective_after: float
    loss: float
    gradient_norm: float
    engine: str
    seconds: float


class GeometryLike(Protocol):
    """What the optimizer needs of a geometry."""

    @property
    def due(self) -> bool: ...
    @property
    def model(self) -> nn.Module | None: ...
    def refresh(self, batch: Any) -> Refresh: ...
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
        lr, steps, solver, momentum, clip, damping: the inner loop, see `llqr.Inner`.
        curvature_scale: "sum", "mean" or a number that multiplies the curvature of the mean loss (default: the
            divergence's, "sum" for ngd, where the curvature weighs the inner batch size times the linear term).
        engine: "auto", "forward", "linearised", "double-backward" or "finite-differences".
        compile: hand the traced product to `torch.compile` (with engine="linearised").
        forward: `forward(model, inputs)` -> outputs, for models that are not called as `model(inputs)`.
        micro_batch: compute a refresh in pieces of this many samples, with the same result and less memory.
        autocast: run the refresh under autocast of this dtype (default: full precision, whatever the caller's context).
        bounds, dtype, apply_dtype, max_side: of the metric, see `llqr.Metric`.
        max_failures: refreshes thrown away in a row before an error.
        capture: replay the refresh as CUDA graphs, for networks whose refresh is bound by kernel launches (small
            images, small batches). Needs a CUDA model, batches of one shape, and keeps the refresh's memory.

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
        if engine == LINEARISED and micro_batch is not None:
            raise ValueError(f"micro_batch: not with engine={LINEARISED!r}, which keeps a whole batch's activations")
        if compile and engine != LINEARISED:
            raise ValueError(f"compile: only with engine={LINEARISED!r}, got engine={engine!r}")
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
        self._inner = Inner(solver, steps, 0.0, momentum, clip, damping)
        self._every, self._ema, self._lr = every, ema, lr
        self._scale = curvature_scale
        self._forward, self._micro_batch, self._autocast = forward, micro_batch, autocast
        self._max_failures = max_failures
        self._compile = compile
        self._trace: Trace | None = None
        self._capture = capture
        self._captured: CapturedRefresh | None = None
        if capture:
            self._check_capturable()
        self._failures_in_a_row = 0
        self._step = 0
        self._next = 0
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in self.parameters.items()}

    def _check_capturable(self) -> None:
        if not all(parameter.is_cuda for parameter in self.parameters.values()):
            raise ValueError("capture: CUDA graphs need every parameter on a CUDA device")
        if self._inner.solver == "cg" or self._micro_batch is not None:
            raise ValueError("capture: not with solver='cg' or micro_batch")

    @property
    def due(self) -> bool:
        """Whether the next optimizer step refreshes the metric."""
        return self._step >= self._next

    def advance(self) -> None:
        """One optimizer step is done."""
        self._step += 1

    def memory(self) -> dict[str, int]:
        """Bytes of the factors per structure, planned and allocated."""
        return self.metric.memory()

    # -- learning ----------------------------------------------------------------------------------------------------

    def refresh(self, batch: Batch | Callable[[], Batch]) -> Refresh:
        """Learn `U` on one batch, and say what happened. On a numerical failure the old metric stays."""
        started = time.perf_counter()
        self._check_place()
        step = self._step
        device = next(iter(self.parameters.values())).device
        inner = replace(self._inner, lr=at(self._lr, step))
        with frozen(self.model, device), torch.no_grad(), torch.autocast(device.type, enabled=False):
            drawn = batch() if callable(batch) else batch
            try:
                curvature, solution = self._solve(drawn, inner)
                blended = self.metric.blend(solution.factors, at(self._ema, step))
                numbers = self._read(curvature, solution, blended)
                reason = _objection(numbers)
            except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
                numbers, reason = dict.fromkeys(_NUMBERS, float("nan")), f"a decomposition failed ({error})"
        if not reason:
            self.metric.assign(blended)
        self._next = step + max(1, round(at(self._every, step)))
        self._count(step, reason)
        return Refresh(
            step=step,
            accepted=not reason,
            reason=reason,
            objective_before=numbers["before"],
            objective_after=numbers["after"],
            loss=numbers["loss"],
            gradient_norm=numbers["gradient_norm"],
            engine=self.engine,
            seconds=time.perf_counter() - started,
        )

    def _check_place(self) -> None:
        """The factors live where the parameters were when the geometry was made."""
        for block in self.metric.blocks:
            parameter = self.parameters[block.parameter]
            if (parameter.device, parameter.dtype) != (block.device, block.dtype):
                raise RuntimeError(
                    f"model: {block.parameter!r} moved from {block.device}, {block.dtype} to {parameter.device}, "
                    f"{parameter.dtype}; make the geometry after moving the model"
                )

    def _solve(self, batch: Batch, inner: Inner) -> tuple[QuadraticModel, Solution]:
        if not self._capture or not self.metric.stored():
            curvature = self._linearise(batch)
            return curvature, solve(self.metric, curvature, inner)
        if self._captured is None or not self._captured.fits(batch, inner):
            self._captured = None  # frees the old graphs before the new ones are made
            self._captured = CapturedRefresh(self._linearise, batch, self.metric, inner)
        return self._captured.run(batch)

    def _linearise(self, batch: Batch) -> QuadraticModel:
        problem = Problem(
            self.model,
            self.loss_fn,
            batch,
            self.parameters,
            forward=self._forward,
            micro_batch=self._micro_batch,
            autocast=self._autocast,
        )
        curvature = self._traced(problem) if self.engine == LINEARISED else self._untraced(problem)
        return RankAverage(curvature) if several_ranks() else curvature

    def _traced(self, problem: Problem) -> QuadraticModel:
        if self._trace is None or not self._trace.fits(problem):
            self._trace = Trace(problem, self.divergence, self._scale, compile=self._compile)
        return self._trace.linearise(problem)

    def _untraced(self, problem: Problem) -> QuadraticModel:
        engine, refused = choose_engine(problem, self.divergence, self.engine)
        if self.engine == "auto" and engine.name == "finite-differences":
            warnings.warn(
                f"engine: chose finite-differences, which is approximate, because {'; '.join(refused)}",
                RefreshWarning,
                stacklevel=5,
            )
        self.engine = engine.name
        return Curvature(problem, self.divergence, engine, self._scale)

    def _read(self, curvature: QuadraticModel, solution: Solution, blended: list[Factors]) -> dict[str, float]:
        """Everything the guards look at, in one transfer from the device."""
        g = curvature.gradient
        moved = self.metric.apply(g, blended)
        along = [(g[name].double() * moved[name].double()).sum() for name in g]
        squares = [part.double().square().sum() for part in g.values()]
        finite = [torch.isfinite(factor).all() for group in blended for factor in group.values()]
        loss = curvature.loss.double()
        numbers = torch.stack(
            [
                solution.before.to(loss.device),
                solution.after.to(loss.device),
                loss,
                torch.stack(squares).sum().sqrt(),
                torch.stack(along).sum(),
                torch.stack([loss.new_ones(()).bool(), *finite]).all().double(),
            ]
        )
        return dict(zip(_NUMBERS, numbers.tolist(), strict=True))

    def _count(self, step: int, reason: str) -> None:
        self.refreshes += 1
        if not reason:
            self._failures_in_a_row = 0
            return
        self.failures += 1
        self._failures_in_a_row += 1
        message = f"refresh at step {step}: kept the old metric, because {reason}"
        if self.failures == 1:
            warnings.warn(message + " (said once; see Geometry.failures)", RefreshWarning, stacklevel=3)
        if self._failures_in_a_row >= self._max_failures:
            raise RefreshError(f"{message}; {self._failures_in_a_row} in a row (max_failures={self._max_failures})")

    # -- use -----------------------------------------------------------------------------------------------------------

    def transport(self, parameters: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
        """`U g` for gradients that stand beside their parameters; parameters of other models pass unchanged."""
        if not self.metric.learned:
            return list(grads)
        names = [self._names.get(parameter) for parameter in parameters]
        known = {name: g for name, g in zip(names, grads, strict=True) if name is not None}
        moved = self.metric.apply(known)
        return [g if name is None else moved[name] for name, g in zip(names, grads, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs to go on bit by bit."""
        counters = {key: getattr(self, key) for key in _COUNTERS}
        return {"metric": self.metric.state_dict(), "engine": self.engine, "counters": counters}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.metric.load_state_dict(state["metric"])
        self.engine = state["engine"]
        for key in _COUNTERS:
            setattr(self, key, int(state["counters"][key]))


class FixedGeometry:
    """A metric that is given, not learned: pairs of a parameter and a function `gradient -> U gradient`.

    Example:
        >>> weight = nn.Parameter(torch.ones(2))
        >>> geometry = FixedGeometry([(weight, lambda g: 3 * g)])
        >>> geometry.transport([weight], [torch.ones(2)])[0].tolist()
        [3.0, 3.0]
    """

    due = False
    model = None

    def __init__(self, metric: Iterable[tuple[Tensor, Callable[[Tensor], Tensor]]]) -> None:
        self._apply = dict(metric)

    def refresh(self, batch: Any) -> Refresh:
        raise RuntimeError("refresh: a fixed geometry is given, not learned")

    def advance(self) -> None:
        pass

    def transport(self, parameters: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
        unchanged: Callable[[Tensor], Tensor] = lambda g: g  # noqa: E731
        return [self._apply.get(p, unchanged)(g) for p, g in zip(parameters, grads, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            raise ValueError("state_dict: a fixed geometry holds no state, but the saved one does")


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside `torch.compile` and (Distributed)DataParallel, with the plain names and derivatives."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


#: An objective may rise by so much of its own terms before a refresh counts as failed: near its minimum rounding alone
#: decides whether it rises, and a refresh thrown away for that says nothing. The size of the slack is a choice.
ROUNDING = 1e-3

_COUNTERS = ("refreshes", "failures", "_failures_in_a_row", "_step", "_next")
_NUMBERS = ("before", "after", "loss", "gradient_norm", "along", "finite")


def _objection(numbers: Mapping[str, float]) -> str:
    """Why a refresh must be thrown away; empty if it need not."""
    before, after = numbers["before"], numbers["after"]
    if not all(map(_is_finite, (numbers["loss"], numbers["gradient_norm"]))):
        return "the loss or its gradient is not finite"
    if not (numbers["finite"] and _is_finite(after)):
        return "the inner loop gave factors or an objective that are not finite"
    if after - before > ROUNDING * max(abs(before), abs(numbers["along"])):
        return f"the objective rose from {before:.6g} to {after:.6g}"
    if not numbers["along"] > 0 and numbers["gradient_norm"] > 0:
        return f"g.Ug = {numbers['along']:.6g} is not positive"
    return ""


def _is_finite(number: float) -> bool:
    return abs(number) < float("inf")

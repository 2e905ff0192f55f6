"""The engines: ways to turn a problem into its quadratic model. A new one is one more class in `ENGINES`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from llqr.curvature.curvature import Curvature
from llqr.curvature.derivatives import (
    Derivatives,
    DoubleBackward,
    FiniteDifferences,
    ForwardMode,
    OneSidedDifferences,
    UnconnectedError,
)
from llqr.curvature.divergence import Divergence, Scale
from llqr.curvature.engine import Engine
from llqr.curvature.passes import PassesEngine
from llqr.curvature.problem import Problem
from llqr.curvature.quadratic import QuadraticModel

if TYPE_CHECKING:
    from llqr.curvature.linearised import Trace


class Direct(Engine):
    """Products by derivatives of the network as it is."""

    derivatives: ClassVar[type[Derivatives]]
    _given_away = False

    def curvature(self, problem: Problem) -> Curvature:
        return Curvature(problem, self.divergence, self.derivatives, self.scale, given_away=self._given_away)

    def linearise(self, problem: Problem) -> QuadraticModel:
        curvature = self.curvature(problem)
        model = curvature.model(self.gradients)
        self._given_away = curvature.given_away  # found out once, and not where a CUDA graph is captured
        return model


class ForwardEngine(Direct):
    name, derivatives = "forward", ForwardMode


class DoubleBackwardEngine(Direct):
    name, derivatives = "double-backward", DoubleBackward


class CentralDifferencesEngine(Direct):
    name, derivatives = "finite-differences", FiniteDifferences
    first_order, exact = True, False


class OneSidedDifferencesEngine(Direct):
    name, derivatives = "one-sided-differences", OneSidedDifferences
    first_order, exact = True, False


class LinearisedEngine(Engine):
    """Products traced once, as a graph of tensor operations of which a refresh repeats only what depends on `v`.

    The first few shapes are traced. Tracing takes long, and torch never forgets the code of a graph: where ever new
    shapes come, the others are computed in forward mode.
    """

    name = "linearised"
    micro_batches = False
    KEPT: ClassVar[int] = 8
    _traces: tuple[Trace, ...] = ()

    def linearise(self, problem: Problem) -> QuadraticModel:
        from llqr.curvature.linearised import Trace, untraced  # slow to import, and rarely needed

        trace = next((trace for trace in self._traces if trace.fits(problem)), None)
        if trace is None and len(self._traces) == self.KEPT:
            return untraced(problem, self.divergence, self.scale, self.gradients)
        if trace is None:
            trace = Trace(problem, self.divergence, self.scale, gradients=self.gradients, compile=self.compile)
            self._traces = (*self._traces, trace)
        return trace.linearise(problem)

    def __getstate__(self) -> dict[str, Any]:
        """Without traces, which cannot be pickled and are made again."""
        return self.__dict__ | {"_traces": ()}


ENGINES: dict[str, type[Engine]] = {
    engine.name: engine
    for engine in (
        ForwardEngine,
        DoubleBackwardEngine,
        CentralDifferencesEngine,
        OneSidedDifferencesEngine,
        LinearisedEngine,
        PassesEngine,
    )
}
#: What "auto" tries, in this order: exact before approximate.
AUTOMATIC: tuple[type[Direct], ...] = (ForwardEngine, DoubleBackwardEngine, CentralDifferencesEngine)
#: An engine whose forward and backward derivatives disagree by more (relative) is not chosen by "auto". Rounding in
#: float32 and tf32 stays below it; coarser dtypes get more room.
ASYMMETRY = 0.01


def choose_engine(
    problem: Problem, divergence: Divergence, scale: Scale | None = None
) -> tuple[type[Engine], list[str]]:
    """The first engine that this model supports, and why the ones before it were refused."""
    refused = []
    tolerance = max(ASYMMETRY, torch.finfo(problem.precision).eps ** 0.5)
    for kind in AUTOMATIC:
        try:
            curvature = kind(divergence, scale).curvature(problem)
            gradient = curvature.gradient()
            product = curvature.product(gradient)
            if kind.exact and curvature.asymmetry(gradient) > tolerance:
                raise RuntimeError("its forward and backward derivatives of this model disagree")
            if kind.exact and divergence.second_order and curvature.skewness(gradient, product) > tolerance:
                raise RuntimeError("its second derivatives of this model are not symmetric")
        except (torch.linalg.LinAlgError, torch.OutOfMemoryError, torch.AcceleratorError):  # type: ignore[attr-defined]
            raise  # a bad batch, or a device in trouble, which says nothing about the engine
        except UnconnectedError:
            raise  # as it is with every engine
        except (NotImplementedError, RuntimeError) as error:
            if "allocate memory" in str(error):  # the same on a CPU, where it has no class of its own
                raise
            refused.append(f"{kind.name}: {str(error).splitlines()[0]}")
            cause = error
        else:
            return kind, refused
    raise RuntimeError("engine: no way to differentiate this model works. " + " | ".join(refused)) from cause

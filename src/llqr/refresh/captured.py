"""A refresh as CUDA graphs, for networks whose refresh is bound by kernel launches.

One graph linearises at the parameters (of a spread refresh: at the copies it stands at), read in place. The others do
an inner step each, on static factors and on the activations the first saved: the first one, which works out the exact
objective beside it, any further one, one without a product with `H`, and the exact objective at the end. A refresh
copies the batch in, replays the first graph once and one of the others a step, and reads the result at the end. Between
two replays the device may do anything: the graphs have their memory to themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from llqr.cuda_graphs import capturing, warming_up
from llqr.curvature import Batch, QuadraticModel
from llqr.curvature.problem import tensors_of
from llqr.metric import Metric
from llqr.solvers.solve import Descent, Inner, Objective, Solution, working_copy

Linearise = Callable[[Batch], QuadraticModel]


class CapturedRefresh:
    """Captured for one batch shape and one set of inner settings; `fits` says whether a batch can be replayed."""

    def __init__(
        self,
        linearise: Linearise,
        batch: Batch,
        metric: Metric,
        inner: Inner,
        precision: torch.dtype | None = None,
    ) -> None:
        self.inner = inner
        self.total = inner.steps + 1
        self.done = 0
        self._metric, self._precision = metric, precision
        self._batch = pytree.tree_map_only(Tensor, torch.clone, batch)
        self._descent = Descent(metric, working_copy(metric), inner)
        self._warm_up(linearise)
        with capturing() as self._linearise:
            self.curvature = linearise(self._batch)
            objective = self._objective = Objective(metric, self.curvature, inner.damping, precision)
        pool = self._linearise.pool()
        # What an engine makes at its first product only, and keeps, is made in the graph that is always replayed first.
        with capturing(pool) as self._look:
            self._before = self._descent.step(objective.exact)
        with capturing(pool) as self._move:
            self._descent.multiply(objective)
        if inner.product_every > 1:
            with capturing(pool) as self._coast:
                self._descent.coast(objective)
        with capturing(pool) as self._judge:
            self._after = objective.exact.at(self._descent.factors).value

    def _warm_up(self, linearise: Linearise) -> None:
        """The solver's state, too, is made outside the graphs."""
        with warming_up():
            for _ in range(2):
                objective = Objective(self._metric, linearise(self._batch), self.inner.damping, self._precision)
                self._descent.step(objective.exact)
                self._descent.multiply(objective)
                if self.inner.product_every > 1:
                    self._descent.coast(objective)

    def fits(self, batch: Batch, inner: Inner) -> bool:
        return inner == self.inner and _signature(batch) == _signature(self._batch)

    def begin(self, batch: Batch) -> None:
        """Linearise on this batch. The tensors of the refresh before are overwritten."""
        for static, given in zip(tensors_of(self._batch), tensors_of(batch), strict=True):
            static.copy_(given)
        for static_factors, factors in zip(self._descent.factors, self._metric.factors(), strict=True):
            for name, factor in factors.items():
                static_factors[name].copy_(factor)
        self._descent.restart()
        self.done = 0
        self._linearise.replay()

    def advance(self) -> None:
        """One step, or at the end the product with `H` that only reads the objective."""
        self._next().replay()
        self.done += 1

    def _next(self) -> torch.cuda.CUDAGraph:
        if self.done == 0:
            return self._look
        if self.done == self.total - 1:
            return self._judge
        return self._move if self.inner.multiplies(self.done) else self._coast

    def solution(self) -> Solution:
        """What was learned, when all is done; the next refresh overwrites it."""
        return Solution(self._descent.factors, self._before, self._after)


def _signature(batch: Batch) -> Any:
    """What a replay cannot change: the structure of the batch, and its tensors' shapes, dtypes and devices."""
    leaves, structure = pytree.tree_flatten(batch)
    return structure, [(leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf for leaf in leaves]

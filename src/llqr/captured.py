"""A refresh as two CUDA graphs, for networks whose refresh is bound by kernel launches.

Graph A linearises at the parameters, read in place; graph B does one inner step on static factors and on the
activations A saved. A refresh copies the batch in, replays A once and B once a step, and reads the result at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .curvature import Batch, QuadraticModel
from .metric import Metric
from .solve import Descent, Inner, Objective, Solution, working_copy

Linearise = Callable[[Batch], QuadraticModel]


class CapturedRefresh:
    """Captured for one batch shape and one set of inner settings; `fits` says whether a batch can be replayed."""

    def __init__(self, linearise: Linearise, batch: Batch, metric: Metric, inner: Inner) -> None:
        self.inner = inner
        self._metric = metric
        self._batch = pytree.tree_map_only(Tensor, torch.clone, batch)
        self._descent = Descent(metric, working_copy(metric), inner)
        self._warm_up(linearise)
        self._a, self._b = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._a, capture_error_mode="thread_local"):
            self._curvature = linearise(self._batch)
            self._objective = Objective(metric, self._curvature, inner.damping)
        with torch.cuda.graph(self._b, pool=self._a.pool(), capture_error_mode="thread_local"):
            self._value = self._descent.step(self._objective)

    def _warm_up(self, linearise: Linearise) -> None:
        """Library handles, workspaces and the solver's state are made outside the capture."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._descent.step(Objective(self._metric, linearise(self._batch), self.inner.damping))
        torch.cuda.current_stream().wait_stream(stream)

    def fits(self, batch: Batch, inner: Inner) -> bool:
        return inner == self.inner and _signature(batch) == _signature(self._batch)

    def run(self, batch: Batch) -> tuple[QuadraticModel, Solution]:
        """One refresh on this batch. Its tensors are overwritten by the next one."""
        for static, given in zip(_tensors(self._batch), _tensors(batch), strict=True):
            static.copy_(given)
        for static_factors, factors in zip(self._descent.factors, self._metric.factors(), strict=True):
            for name, factor in factors.items():
                static_factors[name].copy_(factor)
        for state in self._descent.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()
        self._a.replay()
        self._b.replay()
        before = self._value.clone()
        for _ in range(self.inner.steps - 1):
            self._b.replay()
        learned = [{name: factor.clone() for name, factor in group.items()} for group in self._descent.factors]
        self._b.replay()  # once more, for the objective at the end; the factors it moves are not read again
        return self._curvature, Solution(learned, before, self._value.clone())


def _tensors(batch: Batch) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]


def _signature(batch: Batch) -> Any:
    """What a replay cannot change: the structure of the batch, and its tensors' shapes, dtypes and devices."""
    leaves, structure = pytree.tree_flatten(batch)
    return structure, [(leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf for leaf in leaves]

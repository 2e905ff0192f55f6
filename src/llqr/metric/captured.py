"""`U g` as a CUDA graph, for training loops whose host is slower than their device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from llqr.cuda_graphs import Branches, capturing, warming_up
from llqr.metric.copying import copy_each
from llqr.metric.metric import Metric

NamedTensors = dict[str, Tensor]


class CapturedMetric:
    """A metric whose `U g` is captured at the first call and replayed from then on.

    It falls back to the metric itself for a subset of the parameters, inside a caller's own graph (which captures
    `U g` anyway), for a metric on several devices, and where there are no matrix products (`U g` is then one launch).
    """

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._names = {block.parameter for block in metric.blocks}
        multiplies = any(group.multiplies for group in metric.groups)
        self._worth_it = multiplies and len({block.device for block in metric.blocks}) == 1
        self._captured: CapturedApply | None = None

    def apply(self, grads: Mapping[str, Tensor]) -> NamedTensors:
        """`U g`; the next call overwrites it."""
        whole = self._metric.learned and grads.keys() == self._names
        if not (self._worth_it and whole) or torch.cuda.is_current_stream_capturing():
            return self._metric.apply(grads)
        if self._captured is None:
            self._captured = CapturedApply(self._metric, grads)
        return self._captured(grads)

    def __getstate__(self) -> dict[str, Any]:
        """Without the graph, which cannot be copied and is captured again."""
        return self.__dict__ | {"_captured": None}


class CapturedApply:
    """`U g` for gradients of all parameters, captured once; new factors of the metric are copied to static memory.

    The graph owns its memory: the factors and the gradients in the dtype they are multiplied in, the intermediate
    products, and `U g`.

    Args:
        grads: a gradient of every parameter, in the dtype and memory order that `U g` is to have.
    """

    def __init__(self, metric: Metric, grads: Mapping[str, Tensor]) -> None:
        self._metric = metric
        self._learned = metric.factors()
        self._factors = [{name: factor.clone() for name, factor in own.items()} for own in metric.apply_factors()]
        inboxes = metric.inboxes(self._factors)
        self._blocks = [block for group in metric.groups for block in group.blocks]
        self._places = [view for group, part in zip(metric.groups, inboxes, strict=True) for view in group.unpack(part)]
        branches = Branches() if inboxes[0].is_cuda else None
        self._replay, self._Ug = capture(lambda: metric.apply_inboxes(self._factors, inboxes, grads, branches))

    def __call__(self, grads: Mapping[str, Tensor]) -> NamedTensors:
        if self._metric.factors() is not self._learned:
            self._learned = self._metric.factors()
            for group, own, learned in zip(self._metric.groups, self._factors, self._learned, strict=True):
                copy_each(list(own.values()), list(group.for_inbox(learned).values()))
        copy_each(self._places, [block.piece(grads[block.parameter]) for block in self._blocks])
        self._replay()
        return self._Ug


def capture(compute: Callable[[], NamedTensors]) -> tuple[Callable[[], None], NamedTensors]:
    """A function that repeats `compute` in the same memory, and the tensors it writes its results to."""
    with warming_up():
        compute()
    with capturing() as graph:
        results = compute()
    return graph.replay, results

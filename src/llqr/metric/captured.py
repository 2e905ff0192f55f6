"""`U g` as a CUDA graph, for training loops whose host is slower than their device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from llqr.cuda_graphs import recording, warming_up
from llqr.metric.copying import copy_each
from llqr.metric.metric import Metric
from llqr.metric.structure import Factors

Named = dict[str, Tensor]


class ReplayedMetric:
    """A metric whose `U g` is recorded at the first and replayed from then on.

    Not for some of the parameters only, not inside a caller's graph, which records it by itself, not over several
    devices, and not without matrix products, when it is one launch anyway: there the metric acts as it does.
    """

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._names = {block.parameter for block in metric.blocks}
        multiplies = any(group.multiplies for group in metric.groups)
        self._worth_it = multiplies and len({block.device for block in metric.blocks}) == 1
        self._action: RecordedAction | None = None

    def apply(self, grads: Mapping[str, Tensor]) -> Named:
        """`U g`; overwritten by the next one."""
        whole = self._metric.learned and grads.keys() == self._names
        if not (self._worth_it and whole) or torch.cuda.is_current_stream_capturing():
            return self._metric.apply(grads)
        if self._action is None:
            self._action = RecordedAction(self._metric, grads)
        return self._action(grads)

    def __getstate__(self) -> dict[str, Any]:
        """Without the graph, which cannot be copied and is recorded again."""
        return self.__dict__ | {"_action": None}


class RecordedAction:
    """`U g` for gradients of all parameters, recorded once; a metric that learns is copied to where it is read.

    The graph has its memory to itself: the factors and the gradients in the dtype they are multiplied in, what the
    products leave, and `U g`.

    Args:
        grads: a gradient of every parameter, in the dtype and memory order that `U g` is to have.
    """

    def __init__(self, metric: Metric, grads: Mapping[str, Tensor]) -> None:
        self._metric = metric
        self._learned = metric.factors()
        self._factors = [{name: factor.clone() for name, factor in own.items()} for own in metric.lowered()]
        packed = metric.blank(self._factors)
        self._blocks = [block for group in metric.groups for block in group.blocks]
        self._places = [view for group, part in zip(metric.groups, packed, strict=True) for view in group.unpack(part)]
        self._replay, self._moved = record(lambda: metric.act(self._factors, packed, grads))

    def __call__(self, grads: Mapping[str, Tensor]) -> Named:
        if self._metric.factors() is not self._learned:
            self._learned = self._metric.factors()
            copy_each(_tensors(self._factors), _tensors(self._learned))
        copy_each(self._places, [block.piece(grads[block.parameter]) for block in self._blocks])
        self._replay()
        return self._moved


def record(action: Callable[[], Named]) -> tuple[Callable[[], None], Named]:
    """What does `action` again, reading and writing the same memory, and the tensors it writes its results to."""
    with warming_up():
        action()
    with recording() as graph:
        results = action()
    return graph.replay, results


def _tensors(factors: list[Factors]) -> list[Tensor]:
    return [factor for own in factors for factor in own.values()]

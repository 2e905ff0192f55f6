"""`U g` as a CUDA graph, for training loops whose host is slower than their device."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .copying import copy_each
from .metric import Metric
from .structure import Factors

Named = dict[str, Tensor]


class RecordedAction:
    """`U g` for gradients of all parameters, recorded once; a metric that learns is copied to where it is read.

    What a call returns is overwritten by the next one. The graph has its memory to itself: the factors and the
    gradients in the dtype they are multiplied in, what the products leave, and `U g`.

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
    # Library handles and workspaces are made outside the capture.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        action()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = action()
    return graph.replay, results


def _tensors(factors: list[Factors]) -> list[Tensor]:
    return [factor for own in factors for factor in own.values()]

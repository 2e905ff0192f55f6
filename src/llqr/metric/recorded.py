"""`U g` as a CUDA graph, for training loops whose host is slower than their device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .copying import copy_each
from .metric import Metric


class RecordedAction:
    """`U g` for gradients of all parameters, recorded once for the factors the metric has.

    What a call returns is overwritten by the next one. The graph has its memory to itself: the gradients in the dtype
    they are multiplied in, what the products leave, and `U g`.

    Args:
        grads: a gradient of every parameter, in the dtype and memory order that `U g` is to have.
    """

    def __init__(self, metric: Metric, grads: Mapping[str, Tensor]) -> None:
        self.factors = metric.applied()
        self._blocks = [block for group in metric.groups for block in group.blocks]
        packed = metric.blank()
        self._places = [view for group, part in zip(metric.groups, packed, strict=True) for view in group.unpack(part)]
        self._copy_in(grads)
        # Library handles and workspaces are made outside the capture.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            metric.act(packed, grads)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._moved = metric.act(packed, grads)

    def __call__(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self._copy_in(grads)
        self._graph.replay()
        return self._moved

    def _copy_in(self, grads: Mapping[str, Tensor]) -> None:
        copy_each(self._places, [block.piece(grads[block.parameter]) for block in self._blocks])

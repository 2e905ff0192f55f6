"""The forward and backward pass of a step as a closure, on request recorded once as a CUDA graph and then replayed.

A recorded pass reads its batch from buffers that never move and leaves loss and gradients in memory that never moves;
between replays the optimizer may change weights, gradients and normalisation statistics in place, as `llqr.Optimizer`
does. A batch of another shape than the recorded one (the smaller last batch of an epoch) runs unrecorded.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from llqr.lab.precision import Precision
from llqr.lab.tasks import Batch, Task
from llqr.snapshot import Snapshot

WARM_UP = 3
"""Passes before recording, in which libraries choose their kernels and allocate workspaces."""

Compute = Callable[[], Tensor]
Record = Callable[[Compute, nn.Module], Compute]
"""Turns a pass over fixed buffers into something that repeats it."""


class Pass:
    """Loss and gradients of the batch that was loaded last, each time it is called.

    Gradients are added to those that are there: `llqr.Optimizer` zeroes them before every call.
    """

    def __init__(self, task: Task, model: nn.Module, precision: Precision) -> None:
        self._task, self._model, self._precision = task, model, precision
        self._batch: Batch | None = None

    def load(self, batch: Batch) -> None:
        self._batch = batch

    def __call__(self) -> Tensor:
        return self._compute(self._batch)

    def _compute(self, batch: Batch) -> Tensor:
        inputs, targets = batch
        with self._precision.autocast():
            loss = self._task.loss(self._task.forward(self._model, inputs), targets)
        loss.backward()
        return loss.detach()


class RecordedPass(Pass):
    """A `Pass` that is recorded at the first batch and replayed for every batch of the same shape."""

    def __init__(self, task: Task, model: nn.Module, precision: Precision, record: Record | None = None) -> None:
        super().__init__(task, model, precision)
        self._record = record or record_cuda_graph
        self._fixed: list[Tensor] = []
        self._replay: Compute | None = None
        self._matches = False

    def load(self, batch: Batch) -> None:
        self._batch = batch
        leaves, structure = pytree.tree_flatten(batch)
        if self._replay is None:
            self._fixed = [leaf.clone() for leaf in leaves]
            fixed = pytree.tree_unflatten(self._fixed, structure)
            self._replay = self._record(lambda: self._compute(fixed), self._model)
        self._matches = _same_shapes(leaves, self._fixed)
        if self._matches:
            # Once a step: both passes of a sharpness-aware step read the same buffers.
            torch._foreach_copy_(self._fixed, leaves)

    def __call__(self) -> Tensor:
        return self._replay() if self._matches else self._compute(self._batch)


def record_cuda_graph(compute: Compute, model: nn.Module) -> Compute:
    """Record ``compute``, a forward and backward pass of ``model`` over fixed buffers, as a CUDA graph.

    Recording leaves weights, buffers and random states of the model as they were. Gradients that the graph writes live
    in its own memory: they are overwritten by a replay, not added to.
    """
    device = next(model.parameters()).device
    stream = torch.cuda.Stream(device)
    buffers = Snapshot()
    buffers.take(list(model.buffers()))
    with torch.random.fork_rng(devices=[device]):
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                _drop_gradients(model)
                compute()
        torch.cuda.current_stream(device).wait_stream(stream)
        # Without gradients to add to, the recorded backward pass allocates them in the graph's pool and writes them.
        _drop_gradients(model)
        graph = torch.cuda.CUDAGraph()
        # The stream of the warm-up, because autograd's accumulation nodes remember the stream they were made on; and
        # errors of this thread only, because a loader may be pinning memory in another.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            loss = compute()
    buffers.restore()

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay


def _drop_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def _same_shapes(a: Sequence[Any], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(x.shape == y.shape and x.dtype == y.dtype for x, y in zip(a, b, strict=True))

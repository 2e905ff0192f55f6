"""The forward and backward pass of a step as a closure, on request recorded as CUDA graphs and then replayed.

A recorded pass reads its batch from buffers that never move and leaves loss and gradients in memory that never moves;
between replays the optimizer may change weights, gradients and normalisation statistics in place, as `llqr.Optimizer`
does. There is one recording for each shape of batch, up to a number: images have one or two shapes, sentences a few
dozen. A shape beyond that number runs unrecorded.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from llqr.cuda_graphs import capturing, warming_up
from llqr.lab.tasks import Batch, Task
from llqr.lab.training.precision import Precision
from llqr.step.snapshot import Snapshot

WARM_UP = 3
"""Passes before recording, in which libraries choose their kernels and allocate workspaces."""
MOST_SHAPES = 64
"""Recordings that are kept. Each holds its kernels, some MiB, and its batch; activations they have in common."""

Compute = Callable[[], Tensor]
Record = Callable[[Compute], Compute]
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
    """A `Pass` that is recorded at the first batch of every shape and replayed for the others.

    Args:
        record: makes the recordings; CUDA graphs in one pool of memory by default.
        most: how many shapes are recorded; batches of further shapes run unrecorded.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        precision: Precision,
        record: Record | None = None,
        most: int = MOST_SHAPES,
    ) -> None:
        super().__init__(task, model, precision)
        self._record = record or CudaGraphs(model)
        self._most = most
        self._recordings: dict[Any, tuple[list[Tensor], Compute]] = {}
        self._replay: Compute | None = None

    def load(self, batch: Batch) -> None:
        self._batch = batch
        leaves, structure = pytree.tree_flatten(batch)
        shapes = (structure, *((leaf.shape, leaf.dtype) for leaf in leaves))
        if shapes not in self._recordings and len(self._recordings) < self._most:
            fixed = [leaf.clone() for leaf in leaves]
            held = pytree.tree_unflatten(fixed, structure)
            self._recordings[shapes] = fixed, self._record(lambda: self._compute(held))
        self._replay = None
        if shapes in self._recordings:
            fixed, self._replay = self._recordings[shapes]
            # Once a step: both passes of a sharpness-aware step read the same buffers.
            torch._foreach_copy_(fixed, leaves)

    def __call__(self) -> Tensor:
        return self._compute(self._batch) if self._replay is None else self._replay()


class CudaGraphs:
    """Records forward and backward passes of ``model`` over fixed buffers as CUDA graphs that share their memory.

    No two of them run at the same time and none is read after another one ran, apart from its loss, so that the
    activations of all may lie in the same place. All write the same gradients: those of the first recording, which
    later ones copy theirs to. A replay overwrites gradients, it does not add to them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._device = next(model.parameters()).device
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._gradients: dict[nn.Parameter, Tensor] = {}

    def __call__(self, compute: Compute) -> Compute:
        """Record ``compute``; weights, buffers, gradients' places and random states of the model stay as they were."""
        # Of all recordings the same, because autograd's accumulation nodes remember the stream they were made on.
        self._stream = self._stream or torch.cuda.Stream(self._device)
        buffers = Snapshot()
        buffers.take(list(self._model.buffers()))
        with torch.random.fork_rng(devices=[self._device]):
            with warming_up(self._stream):
                for _ in range(WARM_UP):
                    self._drop_gradients()
                    compute()
            # Without gradients to add to, the recorded backward pass allocates them in the pool and writes them.
            self._drop_gradients()
            with capturing(self._pool, self._stream) as graph:
                loss = compute()
                self._hand_over_gradients()
        self._pool = graph.pool()
        buffers.restore()

        def replay() -> Tensor:
            graph.replay()
            return loss

        return replay

    def _drop_gradients(self) -> None:
        for parameter in self._model.parameters():
            parameter.grad = None

    def _hand_over_gradients(self) -> None:
        """Leave the gradients where those of the first recording lie."""
        made = {parameter: parameter.grad for parameter in self._model.parameters() if parameter.grad is not None}
        self._gradients = self._gradients or made
        if made.keys() != self._gradients.keys():
            raise RuntimeError("A batch gives gradients to other parameters than the first one did; use --no-capture.")
        if made is not self._gradients:
            torch._foreach_copy_(list(self._gradients.values()), list(made.values()))
            for parameter, gradient in self._gradients.items():
                parameter.grad = gradient

"""The forward and backward pass of a step: its precision, its compilation, its capture as CUDA graphs.

A captured pass reads its batch from fixed buffers and leaves loss and gradients at fixed addresses; between replays the
optimizer may change weights, gradients and normalisation statistics in place, as `llqr.Optimizer` does. There is one
graph per shape of batch, up to a limit: images have one or two shapes, sentences a few dozen. Batches of further shapes
run uncaptured.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from llqr.cuda import capturing, warming_up
from llqr.lab.tasks.task import Batch, Task
from llqr.passes import Snapshot

WARM_UP = 3
"""Passes before capture, in which libraries choose their kernels and allocate workspaces."""
MOST_SHAPES = 64
"""Graphs to keep. Each holds its kernels, some MiB, and its batch; they share the memory of activations."""
ENOUGH = 4
"""From this many equal blocks on, faster compilation is worth more than fusion across block boundaries."""

Compute = Callable[[], Tensor]
Capture = Callable[[Compute], Compute]
"""Turns a pass over fixed buffers into a function that replays it."""


@dataclass(frozen=True)
class Precision:
    """``fp32``, ``tf32`` (products in TF32 where the device has it) or ``bf16`` (autocast; weights stay in float32).

    With ``bf16`` what autocast leaves in float32, such as the factors of the metric, uses TF32 products.
    """

    name: str
    device: torch.device

    def set_up(self) -> None:
        """Set the switches of the process that this precision means, for the run that begins."""
        allowed = self.name != "fp32"
        torch.backends.cuda.matmul.allow_tf32 = allowed
        torch.backends.cudnn.allow_tf32 = allowed
        torch.backends.cudnn.benchmark = self.device.type == "cuda"

    def autocast(self) -> AbstractContextManager[None]:
        """The context of a forward pass."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.name == "bf16")


def compile_network(model: nn.Module) -> nn.Module:
    """A compiled form of ``model`` that shares its parameters.

    Repeated blocks are compiled in place, which keeps their names, and ``model`` itself is returned.
    """
    blocks = repeated_blocks(model)
    for block in blocks:
        block.compile()
    if blocks:
        return model
    return torch.compile(model)  # type: ignore[return-value]  # a module, which the stubs do not say


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The members of every container that holds several modules of one class with parameters of the same shapes."""
    found = []
    for container in model.modules():
        if not isinstance(container, nn.Sequential | nn.ModuleList) or len(container) < ENOUGH:
            continue
        composed = next(container[0].children(), None) is not None
        alike = {(type(one), *((name, p.shape) for name, p in one.named_parameters())) for one in container}
        if composed and len(alike) == 1:
            found += list(container)
    return found


class Pass:
    """Loss and gradients of the batch that was loaded last, each time it is called."""

    def __init__(self, task: Task, model: nn.Module, precision: Precision) -> None:
        self._task, self._model, self._precision = task, model, precision
        self._batch: Batch

    def load(self, batch: Batch) -> None:
        self._batch = batch

    def __call__(self) -> Tensor:
        self._zero_gradients()
        return self._compute(self._batch)

    def _zero_gradients(self) -> None:
        self._model.zero_grad()

    def _compute(self, batch: Batch) -> Tensor:
        inputs, targets = batch
        with self._precision.autocast():
            loss = self._task.loss(self._task.forward(self._model, inputs), targets)
        loss.backward()
        return loss.detach()


class CapturedPass(Pass):
    """A `Pass` that is captured at the first batch of every shape and replayed for the others.

    Args:
        capture: makes the graphs; by default CUDA graphs that share one memory pool.
        most: how many shapes are captured; batches of further shapes run uncaptured.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        precision: Precision,
        capture: Capture | None = None,
        most: int = MOST_SHAPES,
    ) -> None:
        super().__init__(task, model, precision)
        self._capture = capture or CudaGraphs(model)
        self._most = most
        self._graphs: dict[Any, tuple[list[Tensor], Compute]] = {}
        self._replay: Compute | None = None

    def load(self, batch: Batch) -> None:
        self._batch = batch
        leaves, structure = pytree.tree_flatten(batch)
        shapes = (structure, *((leaf.shape, leaf.dtype) for leaf in leaves))
        if shapes not in self._graphs and len(self._graphs) < self._most:
            fixed = [leaf.clone() for leaf in leaves]
            held = pytree.tree_unflatten(fixed, structure)
            self._graphs[shapes] = fixed, self._capture(lambda: self._compute(held))
        self._replay = None
        if shapes in self._graphs:
            fixed, self._replay = self._graphs[shapes]
            # Once per step: both passes of a sharpness-aware step read the same buffers.
            torch._foreach_copy_(fixed, leaves)

    def __call__(self) -> Tensor:
        return super().__call__() if self._replay is None else self._replay()  # which overwrites the gradients

    def _zero_gradients(self) -> None:
        self._model.zero_grad(set_to_none=False)  # a replay writes to their memory


class CudaGraphs:
    """Captures forward and backward passes of ``model`` over fixed buffers as CUDA graphs that share their memory.

    No two of them run at the same time, and nothing but the loss is read after another one ran, so that all of them may
    keep their activations in the same memory. All write the same gradients: those of the first graph, to which later
    graphs copy theirs. A replay overwrites gradients, it does not add to them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._device = next(model.parameters()).device
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._gradients: dict[nn.Parameter, Tensor] = {}

    def __call__(self, compute: Compute) -> Compute:
        """Capture ``compute``; weights, buffers, gradient addresses and random states stay as they were."""
        # The same stream for all graphs, because autograd's accumulation nodes remember the one they were made on.
        self._stream = self._stream or torch.cuda.Stream(self._device)
        buffers = Snapshot()
        buffers.take(list(self._model.buffers()))
        with torch.random.fork_rng(devices=[self._device]):
            with warming_up(self._stream):
                for _ in range(WARM_UP):
                    self._model.zero_grad()
                    compute()
            # Without gradients to add to, the captured backward pass allocates them in the pool and writes them.
            self._model.zero_grad()
            with capturing(self._pool, self._stream) as graph:
                loss = compute()
                self._hand_over_gradients()
        self._pool = graph.pool()
        buffers.restore()

        def replay() -> Tensor:
            graph.replay()
            return loss

        return replay

    def _hand_over_gradients(self) -> None:
        """Leave the gradients where those of the first graph are."""
        made = {parameter: parameter.grad for parameter in self._model.parameters() if parameter.grad is not None}
        self._gradients = self._gradients or made
        if made.keys() != self._gradients.keys():
            raise RuntimeError("Batches give gradients to different parameters; use --no-capture.")
        if made is not self._gradients:
            torch._foreach_copy_(list(self._gradients.values()), list(made.values()))
            for parameter, gradient in self._gradients.items():
                parameter.grad = gradient

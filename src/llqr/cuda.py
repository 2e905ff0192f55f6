"""CUDA graphs: the inner loop of a refresh, and `U g`, with few launches from the host.

The inner loop is one graph that linearises at the parameters, read in place, and one more for every kind of step in the
plan, on static factors and on the activations that the first graph saved. A refresh copies the batch in, replays the
first graph once and then the graph of each step, and reads the results at the end. The graphs have their memory to
themselves, so that anything may run on the device between two replays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from math import inf
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from llqr.curvature.batch import Batch, batch_signature, tensors_of
from llqr.curvature.quadratic import QuadraticModel
from llqr.inner import SOLVERS, Inner, Objective, Solution, Step, perform
from llqr.metric import Factors, Metric
from llqr.metric.layout import copy_each
from llqr.metric.metric import Named
from llqr.schedule import at

T = TypeVar("T")


class CapturedLoop:
    """`llqr.inner.solve`, captured for one shape of batch; `fits` says whether it can be replayed for a batch.

    Args:
        model: whose parameters and buffers `linearise` reads.
        linearise: from a batch to its quadratic model.
        step: the optimizer step that a scheduled `inner.lr` is read at.
    """

    def __init__(
        self,
        metric: Metric,
        inner: Inner,
        damping: float | str,
        precision: torch.dtype | None,
        model: nn.Module,
        linearise: Callable[[Batch], QuadraticModel],
        batch: Batch,
        step: int = 0,
    ) -> None:
        self._metric, self._inner, self._plan, self._model = metric, inner, inner.plan(), model
        self._signature = self._held(batch)
        self._batch = pytree.tree_map_only(Tensor, torch.clone, batch)
        lr = at(inner.lr, step, "lr", 0)
        # A tensor if it changes from refresh to refresh, so that the graphs need not be captured again.
        self._lr = torch.tensor(lr, dtype=torch.float32, device=metric.blocks[0].device) if callable(inner.lr) else lr
        self._solver = SOLVERS[inner.solver](metric, inner, self._lr)
        branches = Branches()
        kinds = list(dict.fromkeys(self._plan))

        def objective() -> Objective:
            return Objective(metric, linearise(self._batch), damping, precision, branches)

        def warm_up() -> None:
            warm = objective()  # a local variable, so that its activations are free before others are made
            for kind in kinds:
                perform(kind, self._solver, warm)

        with warming_up():  # library handles, workspaces and the solver's state are made outside the graphs
            for _ in range(2):
                warm_up()
        with capturing() as self._linearise:
            self._objective = objective()
        self._graphs: dict[Step, torch.cuda.CUDAGraph] = {}
        self._values: dict[Step, Tensor] = {}
        # In the plan's order: what an engine makes at its first product only, and keeps, is made in the graph of the
        # first step, which is always replayed first.
        for kind in kinds:
            with capturing(self._linearise.pool()) as self._graphs[kind]:
                value = perform(kind, self._solver, self._objective)
            if value is not None:
                self._values[kind] = value

    def fits(self, batch: Batch) -> bool:
        return bool(self._held(batch) == self._signature)

    def _held(self, batch: Batch) -> Any:
        """What the graphs hold fixed: the kind of batch, and where the model's tensors are (`.to` may move them)."""
        read = *self._model.parameters(), *self._model.buffers()
        return batch_signature(batch), [tensor.data_ptr() for tensor in read if tensor.layout == torch.strided]

    def solve(self, batch: Batch, step: int = 0) -> Solution:
        """The inner loop on this batch; the next one overwrites the solution."""
        for static, given in zip(tensors_of(self._batch), tensors_of(batch), strict=True):
            static.copy_(given)
        for static_factors, factors in zip(self._solver.factors, self._metric.factors(), strict=True):
            for name, factor in factors.items():
                static_factors[name].copy_(factor)
        if isinstance(self._lr, Tensor):
            self._lr.fill_(at(self._inner.lr, step, "lr", 0))
        self._solver.restart()
        self._linearise.replay()
        for kind in self._plan:
            self._graphs[kind].replay()
        values, model = self._values, self._objective.quadratic
        return Solution(self._solver.factors, values["first"], values["last"], model.loss, model.gradient)


class CapturedMetric:
    """A metric whose `U g` is captured at the first call and replayed from then on.

    For training loops whose host is slower than their device. It falls back to the metric itself for a subset of the
    parameters, inside a caller's own graph (which captures `U g` anyway), for a metric on several devices or with
    identities, and where there are no matrix products (`U g` is then one launch).

    The graph owns its memory: the gradients, the intermediate products and `U g`. It reads the factors in the dtype
    that they multiply in; new ones are copied to where it reads. Those of the metric's own dtype are held once.
    """

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._names = {block.parameter for block in metric.blocks}
        multiplies = any(group.multiplies for group in metric.groups) and all(g.shapes() for g in metric.groups)
        self._worth_it = multiplies and len({block.device for block in metric.blocks}) == 1
        self._replay: Callable[[], None] | None = None
        self._learned: list[Factors] = []
        self._factors: list[Factors] = []
        self._places: list[Tensor] = []
        self._Ug: Named = {}

    def apply(self, grads: Mapping[str, Tensor]) -> Named:
        """`U g`; the next call overwrites it."""
        metric = self._metric
        whole = metric.learned and grads.keys() == self._names
        if not (self._worth_it and whole) or torch.cuda.is_current_stream_capturing():
            return metric.apply(grads)
        replay = self._replay = self._replay or self._captured(grads)
        if metric.factors() is not self._learned:
            pairs = list(zip(self._factors, metric.factors(), strict=True))
            for own, learned in pairs:
                copy_each(list(own.values()), list(learned.values()))
            metric.assign([{n: f if f.dtype == new[n].dtype else new[n] for n, f in own.items()} for own, new in pairs])
            self._learned = metric.factors()
        blocks = [block for group in metric.groups for block in group.blocks]
        copy_each(self._places, [block.piece(grads[block.parameter]) for block in blocks])
        replay()
        return self._Ug

    def _captured(self, grads: Mapping[str, Tensor]) -> Callable[[], None]:
        """For gradients in the dtype and memory order that `U g` is to have."""
        metric = self._metric
        self._learned, self._factors = metric.factors(), metric.apply_factors()
        # Gradients are copied once, to where they are multiplied, in the dtype of the factors.
        packed = [
            group.blank(next(iter(own.values())).dtype, group.device)
            for group, own in zip(metric.groups, self._factors, strict=True)
        ]
        self._places = [view for group, own in zip(metric.groups, packed, strict=True) for view in group.unpack(own)]
        branches = Branches() if metric.blocks[0].device.type == "cuda" else None
        replay, self._Ug = capture(lambda: metric.apply_packed(packed, self._factors, grads, branches))
        return replay

    def __reduce__(self) -> tuple[type[CapturedMetric], tuple[Metric]]:
        """Copies have no graph, which cannot be copied, and capture their own."""
        return CapturedMetric, (self._metric,)


def capture(compute: Callable[[], Named]) -> tuple[Callable[[], None], Named]:
    """A function that repeats `compute` in the same memory, and the tensors it writes its results to."""
    with warming_up():
        compute()
    with capturing() as graph:
        results = compute()
    return graph.replay, results


# -- how graphs are captured -------------------------------------------------------------------------------------------


@contextmanager
def warming_up(stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """Run here first what is to be captured: library handles and workspaces must be made outside a graph."""
    stream = stream or torch.cuda.Stream()
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


class Branches:
    """Streams on which parts of a graph that do not depend on each other run side by side.

    Products of small matrices leave most of a device idle. All graphs share a few streams, since each stream has a
    workspace of its own for matrix products.
    """

    def __init__(self, count: int = 8) -> None:
        self._streams = _streams(torch.cuda.current_device(), count)
        self._used: list[torch.cuda.Stream] = []

    def run(self, each: Sequence[Callable[[], T]], sizes: Sequence[int], alone: float = inf) -> list[T]:
        """What these functions return; those of at least the size `alone` run one by one.

        The smallest begin first: behind large products, which fill the device, their many short kernels would each
        have to wait, and they would go on when the large ones are done.
        """
        found: dict[int, T] = {}
        for i in sorted(range(len(each)), key=sizes.__getitem__):
            if sizes[i] >= alone:
                self.join()
            with self.one() if sizes[i] < alone else nullcontext():
                found[i] = each[i]()
        self.join()
        return [found[i] for i in range(len(each))]

    @contextmanager
    def one(self) -> Iterator[None]:
        """What runs inside waits for the current stream, but not for what runs in other branches."""
        stream = self._streams[len(self._used) % len(self._streams)]
        self._used.append(stream)
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        """The current stream waits for all branches."""
        for stream in dict.fromkeys(self._used):
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        self._used.clear()


@cache
def _streams(device: int, count: int) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(count)]


@contextmanager
def capturing(pool: Any = None, stream: torch.cuda.Stream | None = None) -> Iterator[torch.cuda.CUDAGraph]:
    """The graph of what runs inside, with its own memory or that of another graph's pool."""
    graph = torch.cuda.CUDAGraph()
    # Only this thread's errors count, because a loader may be pinning memory in another.
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        yield graph

"""How CUDA graphs are captured, wherever one is used."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from math import inf
from typing import Any, TypeVar

import torch

T = TypeVar("T")


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

"""How CUDA graphs are captured, wherever one is used."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


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

    A few, since each has a workspace of its own for matrix products.
    """

    def __init__(self, count: int = 4) -> None:
        self._streams = [torch.cuda.Stream() for _ in range(count)]
        self._used: list[torch.cuda.Stream] = []

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


@contextmanager
def capturing(pool: Any = None, stream: torch.cuda.Stream | None = None) -> Iterator[torch.cuda.CUDAGraph]:
    """The graph of what runs inside, with its own memory or that of another graph's pool."""
    graph = torch.cuda.CUDAGraph()
    # Only this thread's errors count, because a loader may be pinning memory in another.
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        yield graph

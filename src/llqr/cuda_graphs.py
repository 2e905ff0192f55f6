"""How CUDA graphs are captured, wherever one is used."""

from __future__ import annotations

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


@contextmanager
def capturing(pool: Any = None, stream: torch.cuda.Stream | None = None) -> Iterator[torch.cuda.CUDAGraph]:
    """The graph of what runs inside, with its own memory or that of another graph's pool."""
    graph = torch.cuda.CUDAGraph()
    # Only this thread's errors count, because a loader may be pinning memory in another.
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        yield graph

"""How CUDA graphs are made, wherever something is recorded to be replayed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def warming_up(stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """What is to be recorded runs in here first: library handles and workspaces are not made in a graph."""
    stream = stream or torch.cuda.Stream()
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


@contextmanager
def recording(pool: Any = None, stream: torch.cuda.Stream | None = None) -> Iterator[torch.cuda.CUDAGraph]:
    """The graph of what runs in here, with memory of its own or from another graph's pool."""
    graph = torch.cuda.CUDAGraph()
    # Errors of this thread only, because a loader may be pinning memory in another.
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        yield graph

"""`llqr bench memory`: the most bytes a step and a refresh hold at once, by method and structure.

Everything a training run holds counts: weights, gradients, momentum, activations and the factors of `U`. The refresh is
measured where it happens, between steps of LLQR+SAM.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from rich.table import Table

from llqr.lab.bench.refresh import RefreshSettings, geometry_of, learn
from llqr.lab.bench.timing import WARM_UP
from llqr.lab.bench.workload import METHODS, Network, Setup, learns_metric, step_of
from llqr.lab.errors import ConfigurationError
from llqr.lab.number_table import IN_MIB, Column, number_table

STEPS = 2
"""A refresh of two inner steps holds as much as a longer one."""
REFRESH = "refresh"


def peak(device: torch.device, action: Callable[[], object]) -> int:
    """The most bytes that are allocated while an action runs."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    action()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def measure(setup: Setup, structures: Sequence[RefreshSettings]) -> Iterator[dict[str, Any]]:
    """Steps of the methods without a metric, then steps and a refresh for every structure."""
    if not setup.on_cuda:
        raise ConfigurationError("--device: peak memory is counted by the allocator of a CUDA device, got the CPU.")
    plain = [(method, None) for method in METHODS if not learns_metric(method)]
    learned = [(what, one) for one in structures for what in (*filter(learns_metric, METHODS), REFRESH)]
    for network in setup.networks:
        rows = [_row(setup, network, *one) for one in (*plain, *learned)]
        sam = next(row["peak_bytes"] for row in rows if row["what"] == "SAM")
        yield from (row | {"vs_sam": row["peak_bytes"] / sam} for row in rows)


def _row(setup: Setup, network: Network, what: str, settings: RefreshSettings | None) -> dict[str, Any]:
    """Of a step, or of a refresh between two steps."""
    workload = setup.workload(network)
    geometry = None if settings is None else learn(geometry_of(workload, settings), workload)
    step = step_of("LLQR+SAM" if what == REFRESH else what, workload, geometry)
    for _ in range(WARM_UP):
        step()
    action = partial(geometry.refresh, workload.batch) if geometry is not None and what == REFRESH else step
    most = peak(setup.precision.device, action)
    held = 0 if geometry is None else geometry.memory()["allocated"]
    structure = settings and settings.structure
    return {"model": network.label, "what": what, "structure": structure, "peak_bytes": most, "metric_bytes": held}


def as_table(rows: Sequence[dict[str, Any]]) -> Table:
    sizes = [Column("peak MiB", "peak_bytes", "{:,.1f}", IN_MIB), Column("U MiB", "metric_bytes", "{:,.1f}", IN_MIB)]
    ratio = Column("vs SAM step", "vs_sam", "{:.3f}")
    return number_table("memory", rows, ("model", "what", "structure"), [*sizes, ratio])

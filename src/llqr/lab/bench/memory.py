"""`llqr bench memory`: the most bytes a step and a refresh hold at once, by method and structure.

All of a training run counts: weights, gradients, momentum, activations, and the factors of `U`. The refresh is measured
where it happens, between steps of LLQR+SAM. A refresh without the factors is that of a metric with one number a layer.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from llqr.lab.bench.methods import METHODS, learns_metric, step_of
from llqr.lab.bench.refreshing import Refreshing, geometry_for
from llqr.lab.bench.sampling import WARM_UP
from llqr.lab.bench.tables import Table, number
from llqr.lab.bench.workload import Network, Workload
from llqr.lab.config.strict import ConfigurationError
from llqr.lab.training.precision import Precision

WITHOUT_FACTORS = "scalar"
STEPS = 2
"""A refresh of two steps holds as much as a longer one."""

Peak = Callable[[Callable[[], object]], int]
"""The most bytes that are allocated while an action runs."""


def cuda_peak(device: torch.device) -> Peak:
    if device.type != "cuda":
        raise ConfigurationError("--device: peak memory is counted by the allocator of a CUDA device, got the CPU.")

    def peak(action: Callable[[], object]) -> int:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        action()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)

    return peak


def measure(
    networks: Sequence[Network],
    structures: Sequence[str],
    batch: int,
    precision: Precision,
    refreshing: Refreshing,
    peak: Peak,
) -> Iterator[dict[str, Any]]:
    """Steps of the methods without a metric, then steps and a refresh for every structure."""
    for network in networks:
        workload = partial(Workload, network, batch, precision)
        plain = {m: _bytes(workload(), m, refreshing, peak) for m in METHODS if not learns_metric(m)}
        sam = plain["SAM"]["peak_bytes"]
        yield from (_row(network, method, None, found, sam) for method, found in plain.items())
        for structure in dict.fromkeys([*structures, WITHOUT_FACTORS]):
            own = replace(refreshing, structure=structure)
            if structure in structures:
                for method in filter(learns_metric, METHODS):
                    yield _row(network, method, structure, _bytes(workload(), method, own, peak), sam)
            what = "refresh without factors" if structure == WITHOUT_FACTORS else "refresh"
            yield _row(network, what, structure, _bytes(workload(), "LLQR+SAM", own, peak, refresh=True), sam)


def _row(network: Network, what: str, structure: str | None, found: dict[str, int], sam: int) -> dict[str, Any]:
    names = {"model": network.label, "what": what, "structure": structure}
    return names | found | {"vs_sam": found["peak_bytes"] / sam}


def _bytes(
    workload: Workload, method: str, refreshing: Refreshing, peak: Peak, *, refresh: bool = False
) -> dict[str, int]:
    """Of a step, or of a refresh between two steps."""
    geometry = geometry_for(workload, refreshing) if learns_metric(method) else None
    if geometry is not None:
        geometry.pretend()
    step = step_of(method, workload, geometry)
    for _ in range(WARM_UP):
        step()
    most = peak(geometry.learn if refresh else step)
    return {"peak_bytes": most, "metric_bytes": 0 if geometry is None else geometry.memory()["allocated"]}


def as_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("memory", "model", "what", "structure", numbers=("peak MiB", "U MiB", "vs SAM step"))
    for row in rows:
        table.add(
            row["model"],
            row["what"],
            row["structure"],
            number(row["peak_bytes"] / 2**20, ",.1f"),
            number(row["metric_bytes"] / 2**20, ",.1f"),
            number(row["vs_sam"], ".3f"),
        )
    return table

"""`llqr bench memory`: the most bytes a step and a refresh hold at once, by method and structure.

Everything a training run holds counts: weights, gradients, momentum, activations and the factors of `U`. The refresh is
measured where it happens, between steps of LLQR+SAM. A refresh without factors is that of a metric with one number per
layer.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from rich.table import Table

from llqr.lab.bench.measured_refresh import MeasuredRefresh, RefreshSettings
from llqr.lab.bench.timing import WARM_UP
from llqr.lab.bench.workload import METHODS, Network, Setup, Workload, learns_metric, step_of
from llqr.lab.errors import ConfigurationError
from llqr.lab.number_table import IN_MIB, Column, number_table

WITHOUT_FACTORS = "scalar"
STEPS = 2
"""A refresh of two inner steps holds as much as a longer one."""

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


def measure(setup: Setup, structures: Sequence[RefreshSettings], peak: Peak) -> Iterator[dict[str, Any]]:
    """Steps of the methods without a metric, then steps and a refresh for every structure."""
    for network in setup.networks:
        plain = {m: _bytes(setup.workload(network), m, structures[0], peak) for m in METHODS if not learns_metric(m)}
        sam = plain["SAM"]["peak_bytes"]
        yield from (_row(network, method, None, found, sam) for method, found in plain.items())
        for settings in dict.fromkeys([*structures, replace(structures[0], structure=WITHOUT_FACTORS)]):
            structure = settings.structure
            if settings in structures:
                for method in filter(learns_metric, METHODS):
                    found = _bytes(setup.workload(network), method, settings, peak)
                    yield _row(network, method, structure, found, sam)
            what = "refresh without factors" if structure == WITHOUT_FACTORS else "refresh"
            found = _bytes(setup.workload(network), "LLQR+SAM", settings, peak, of_refresh=True)
            yield _row(network, what, structure, found, sam)


def _row(network: Network, what: str, structure: str | None, found: dict[str, int], sam: int) -> dict[str, Any]:
    names = {"model": network.label, "what": what, "structure": structure}
    return names | found | {"vs_sam": found["peak_bytes"] / sam}


def _bytes(
    workload: Workload, method: str, settings: RefreshSettings, peak: Peak, *, of_refresh: bool = False
) -> dict[str, int]:
    """Of a step, or of a refresh between two steps."""
    if not learns_metric(method):
        return {"peak_bytes": peak(_warmed_up(step_of(method, workload))), "metric_bytes": 0}
    refresh = MeasuredRefresh(workload, settings)
    refresh.run_once_for_steps()
    step = _warmed_up(step_of(method, workload, refresh.geometry))
    most = peak(refresh.run if of_refresh else step)
    return {"peak_bytes": most, "metric_bytes": refresh.geometry.memory()["allocated"]}


def _warmed_up(step: Callable[[], object]) -> Callable[[], object]:
    for _ in range(WARM_UP):
        step()
    return step


def as_table(rows: Sequence[dict[str, Any]]) -> Table:
    sizes = [Column("peak MiB", "peak_bytes", "{:,.1f}", IN_MIB), Column("U MiB", "metric_bytes", "{:,.1f}", IN_MIB)]
    ratio = Column("vs SAM step", "vs_sam", "{:.3f}")
    return number_table("memory", rows, ("model", "what", "structure"), [*sizes, ratio])

"""`llqr bench shards`: what a metric that is shared out among ranks holds, sends and computes on each of them.

There are three kinds of rows:

* "planned": the fullest rank's part of the metric for the paper's networks, which are built on the meta device;
* "one rank": a network on the device, as the fullest rank of an imitated process group (torch's `fake` one), so that
  one device is enough. Memory and time are those of a rank; the vectors of the other ranks are not real;
* "gloo": real processes on the CPU, whose collectives are counted. The row has the largest count of any rank.

A vector of the weights' size `P` costs a rank `P (S - 1) / S`: one for every `U g` of a step, in a refresh two for
every product (`U g` and `H U g`) and one for every gradient. Segments have the length of the longest, which is padding.
"""

import json
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from torch.utils._python_dispatch import TorchDispatchMode

import llqr
from llqr.distributed.owned import Owned
from llqr.lab.bench.measured_refresh import MeasuredRefresh, RefreshSettings
from llqr.lab.bench.memory import WITHOUT_FACTORS, cuda_peak
from llqr.lab.bench.step import BURST
from llqr.lab.bench.timing import Action, interleaved, quartiles
from llqr.lab.bench.workload import Network, Setup, Workload
from llqr.lab.number_table import IN_MIB, Column, number_table
from llqr.lab.passes import Precision
from llqr.lab.results import storage
from llqr.lab.results.paper_table import paper

COUNTS = (1, 2, 4, 8)
Row = dict[str, Any]


def measure(
    setup: Setup, settings: RefreshSettings, shards: Sequence[int], repeats: int, *, processes: bool
) -> Iterator[Row]:
    yield from planned(settings.structure, shards)
    for network in setup.networks:
        rows = [one_rank(setup, network, settings, count, repeats) for count in shards]
        yield from (row | _shares(row, rows) for row in rows)
        if processes:
            yield from (gloo(setup, network, settings, count) for count in shards if count > 1)


def planned(structure: str, shards: Sequence[int]) -> Iterator[Row]:
    """The paper's networks, whose storage it prints for one and four devices."""
    printed = {(row["model"], row["structure"], row["shards"]): row for row in paper()["storage"]["rows"]}
    for row in storage.rows(shards, (structure,)):
        theirs = printed.get((row.model, structure, row.shards))
        yield {
            "model": row.model,
            "what": "planned",
            "structure": structure,
            "shards": row.shards,
            "metric_bytes": row.largest_shard * torch.float32.itemsize,
            "metric_share": row.shards * row.largest_shard / row.precond_params,
            "paper_mib": None if theirs is None else theirs["precond_mib"],
        }


@contextmanager
def imitated_rank(shards: int, metric: llqr.Metric) -> Iterator[dist.ProcessGroup | None]:
    """The fullest rank of so many, whose collectives return at once."""
    if shards == 1:
        yield None
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    held = storage.scalars_of_shards(metric, shards)
    dist.init_process_group("fake", store=FakeStore(), rank=held.index(max(held)), world_size=shards)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def one_rank(setup: Setup, network: Network, settings: RefreshSettings, shards: int, repeats: int) -> Row:
    """Memory of the factors and of a refresh, time of `U g`, and payload, as the fullest rank."""
    device = setup.precision.device
    with torch.device("meta"):
        plan = llqr.Metric(network.build(), structure=settings.structure, max_side=settings.runtime.max_side)
    with imitated_rank(shards, plan) as group:
        peaks = {}
        if device.type == "cuda":
            for structure in (settings.structure, WITHOUT_FACTORS):
                refresh = _refresh(setup.workload(network), replace(settings, structure=structure), shards, group)
                # The vectors of an imitated group are not the other ranks', so that refreshes may be rejected.
                with warnings.catch_warnings(action="ignore", category=llqr.RefreshWarning):
                    refresh.run_once_for_steps()
                    peaks[structure] = cuda_peak(device)(refresh.run)
                del refresh
        workload = setup.workload(network)
        refresh = _refresh(workload, settings, shards, group)
        counted = _payload(workload, refresh, settings, shards)
        metric = refresh.geometry.metric
        own = metric.placement.to_owner(_gradients(workload))
        action = Action(lambda: metric.apply(own), repeats, BURST)
        seconds = interleaved({"apply": action}, workload.clock)["apply"]
        return {
            "model": network.label,
            "what": "one rank",
            "structure": settings.structure,
            "shards": shards,
            "metric_bytes": refresh.geometry.memory()["allocated"],
            "refresh_bytes": peaks[settings.structure] - peaks[WITHOUT_FACTORS] if peaks else None,
            "apply_seconds": quartiles(seconds),
        } | counted


def _refresh(
    workload: Workload, settings: RefreshSettings, shards: int, group: dist.ProcessGroup | None
) -> MeasuredRefresh:
    runtime = replace(settings.runtime, process_group=group)
    return MeasuredRefresh(workload, replace(settings, runtime=runtime), shards=shards)


def _gradients(workload: Workload) -> dict[str, Tensor]:
    generator = torch.Generator(workload.precision.device).manual_seed(1)
    return {
        name: torch.empty_like(p).normal_(generator=generator)
        for name, p in workload.model.named_parameters()
        if p.requires_grad
    }


def _payload(workload: Workload, refresh: MeasuredRefresh, settings: RefreshSettings, shards: int) -> Row:
    """Bytes that a rank receives for one `U g` and in one refresh, and what the formulas say."""
    geometry = refresh.geometry
    with warnings.catch_warnings(action="ignore", category=llqr.RefreshWarning):
        refresh.run_once_for_steps()  # the first refresh chooses an engine, which ranks agree about
        if shards == 1:
            return {}
        placement = geometry.metric.placement
        assert isinstance(placement, Owned)
        gradients, parameters = _gradients(workload), geometry.parameters
        with Payload(placement.buffer_lengths) as step:
            geometry.transport(list(parameters.values()), [gradients[name] for name in parameters])
        with Payload(placement.buffer_lengths) as whole:
            refresh.run()
    inner = settings.inner
    vectors = 2 * inner.products + (1 if inner.gradients == 1 else 1 + inner.gradients)
    exact = sum(parameter.nbytes for parameter in parameters.values()) * (shards - 1) // shards
    padded = placement.buffer_bytes * (shards - 1) // shards
    return {
        "step_payload": step.vectors,
        "step_formula": exact,
        "refresh_payload": whole.vectors,
        "refresh_formula": vectors * exact,
        "padding": padded - exact,
        "vectors": vectors,
        "numbers": step.numbers + whole.numbers,
    }


def _shares(row: Row, rows: Sequence[Row]) -> Row:
    """What a rank has, times the number of shards, in units of the whole: 1 where it is shared out evenly."""
    whole = next((other for other in rows if other["shards"] == 1), None)
    if whole is None:
        return {}
    shares = {"metric": "metric_bytes", "refresh": "refresh_bytes"}
    found = {
        f"{name}_share": row["shards"] * row[key] / whole[key] for name, key in shares.items() if row[key] is not None
    }
    apply = row["shards"] * row["apply_seconds"]["median"] / whole["apply_seconds"]["median"]
    return found | {"apply_share": apply}


def gloo(setup: Setup, network: Network, settings: RefreshSettings, shards: int) -> Row:
    """The payload counted in real processes on the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (shards, folder, network, setup.batch, settings)
        spawn(_gloo_rank, args=arguments, nprocs=shards)
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(shards)]
    names = {"model": network.label, "what": "gloo", "structure": settings.structure, "shards": shards}
    return names | {key: max(rank[key] for rank in ranks) for key in ranks[0]}


def _gloo_rank(rank: int, shards: int, folder: str, network: Network, batch: int, settings: RefreshSettings) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=shards)
    workload = Workload(network, batch, Precision("fp32", torch.device("cpu")))
    refresh = _refresh(workload, settings, shards, dist.group.WORLD)
    counted = _payload(workload, refresh, settings, shards)
    counted["metric_bytes"] = refresh.geometry.memory()["allocated"]
    (Path(folder) / f"{rank}.json").write_text(json.dumps(counted))
    dist.barrier()
    dist.destroy_process_group()


def as_table(rows: Sequence[Row]) -> Table:
    numbers = [
        Column("S", "shards", "{}"),
        Column("U MiB", "metric_bytes", "{:,.2f}", IN_MIB),
        Column("paper", "paper_mib", "{:,.2f}"),
        Column("x S", "metric_share", "{:.3f}"),
        Column("refresh MiB", "refresh_bytes", "{:,.2f}", IN_MIB),
        Column("x S", "refresh_share", "{:.3f}"),
        Column("U g ms", "apply_seconds.median", "{:.3f}", 1e3),
        Column("x S", "apply_share", "{:.3f}"),
        Column("step receives MiB", "step_payload", "{:,.2f}", IN_MIB),
        Column("formula", "step_formula", "{:,.2f}", IN_MIB),
        Column("refresh receives MiB", "refresh_payload", "{:,.2f}", IN_MIB),
        Column("formula", "refresh_formula", "{:,.2f}", IN_MIB),
        Column("padding", "refresh_padding", "{:,.2f}", IN_MIB),
        Column("numbers KiB", "numbers", "{:,.1f}", 1 / 1024),
    ]
    shown = [row | {"refresh_padding": row["vectors"] * row["padding"]} if "vectors" in row else row for row in rows]
    return number_table("shards", shown, ("model", "what", "structure"), numbers)


class Payload(TorchDispatchMode):
    """Bytes that this rank receives while entered: of vectors, and of the few numbers that ranks agree about.

    A ring brings a rank `(n - 1) / n` of a gathered or scattered buffer, and twice that of a reduced one.

    Attributes:
        vectors: bytes of buffers whose length in entries is one of `lengths`.
        numbers: bytes of all others.
    """

    def __init__(self, lengths: Collection[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own has no annotations
        self._lengths = set(lengths)
        self.vectors = 0
        self.numbers = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        received = RECEIVED.get(func)
        if received is not None:
            buffer, count = received(*args)
            if buffer.numel() in self._lengths:
                self.vectors += count
            else:
                self.numbers += count
        return func(*args, **(kwargs or {}))


def _reduced(tensors: list[Tensor], group: Any, *rest: Any) -> tuple[Tensor, int]:
    ranks = dist.ProcessGroup.unbox(group).size()
    return tensors[0], 2 * (ranks - 1) * sum(tensor.nbytes for tensor in tensors) // ranks


RECEIVED: dict[Any, Callable[..., tuple[Tensor, int]]] = {
    torch.ops.c10d._allgather_base_.default: lambda output, given, *_: (output, output.nbytes - given.nbytes),
    torch.ops.c10d._reduce_scatter_base_.default: lambda output, given, *_: (given, given.nbytes - output.nbytes),
    torch.ops.c10d.allreduce_.default: _reduced,
}

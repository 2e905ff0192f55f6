"""What a shared metric costs on many devices, on paper: bytes and arithmetic from the real plan, speeds assumed.

LLQR+SAM: two forward and backward passes and two `U g` per step, a refresh every so many steps. ViT-L is trained under
DDP, with one copy of the metric in every node; the 7B decoder under FSDP2 with 64 shards, more devices being copies.
Nothing overlaps here, which is the worst case.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from llqr import Inner, Metric
from llqr.distributed.owners import owners
from llqr.distributed.placement import Placement
from llqr.geometry.geometry import DEFAULT_INNER
from llqr.lab import models
from llqr.lab.models.language_model import LanguageModel
from llqr.lab.number_table import IN_MIB, Column, number_table
from llqr.lab.results.storage import scalars_of_shards

DEVICES = (64, 256, 1024)
NODE = 8
#: Assumed, per device: sustained arithmetic, and bytes per second inside a node and between nodes.
FLOPS, NVLINK, NETWORK = 400e12, 300e9, 40e9
#: Steps between refreshes.
EVERY = 500
WIDTH = torch.float32.itemsize
#: A product with `H` (forward mode and a pull-back, or two forward passes and a backward one) in passes of a step.
PRODUCT = 4 / 3


@dataclass(frozen=True)
class Job:
    """A network in training; `tokens` are those of one device's batch, which a refresh learns from too."""

    name: str
    model: nn.Module
    structure: str
    tokens: int
    shards: int
    sharded_weights: bool
    inner: Inner = DEFAULT_INNER

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())


def jobs() -> Iterator[Job]:
    """On the meta device."""
    with torch.device("meta"):
        yield Job("ViT-L/16, DDP", models.build("vit-l"), "e-kfac", 64 * 197, NODE, sharded_weights=False)
        decoder = LanguageModel(50257, width=4096, heads=32, layers=32, context=2048)
        yield Job("7B decoder, FSDP2", decoder, "e-kfac-one-sided", 4 * 2048, 64, sharded_weights=True)


def costs() -> list[dict[str, Any]]:
    """Of one device among `devices`: bytes of the metric, and seconds; `overhead` is what it adds to a step of SAM."""
    return [cost for job in jobs() for cost in _costs(job)]


def _costs(job: Job) -> Iterator[dict[str, Any]]:
    metric = Metric(job.model, structure=job.structure)
    held = scalars_of_shards(metric, job.shards)
    P, S = WIDTH * job.parameters, job.shards
    one_pass = 6 * job.parameters * job.tokens / FLOPS
    products = job.inner.products
    apply = _apply_flops(metric, S) / FLOPS
    for devices in DEVICES:
        copies = devices // S
        between_copies = 2 * (P / S) * (copies - 1) / copies / NETWORK
        if job.sharded_weights:
            vector = 2 * P * (S - 1) / S**2 / NETWORK  # to the owners and back
            passes = 3 * P * (S - 1) / S / NETWORK + between_copies
            product = 4 * P * (S - 1) / S / NETWORK + vector + between_copies
            gradient = passes
        else:
            vector = P * (S - 1) / S / NVLINK
            passes = 2 * P * (devices - 1) / devices / NETWORK
            product = 2 * vector + between_copies
            gradient = vector + between_copies
        step = {"step_compute": 2 * one_pass, "step_traffic": 2 * passes}
        applied = {"apply_compute": 2 * apply, "apply_traffic": 2 * vector}
        refresh = {
            "refresh_compute": (1 + PRODUCT * products) * one_pass + 3 * job.inner.steps * apply,
            "refresh_traffic": products * product + gradient,
        }
        added = sum(applied.values()) + sum(refresh.values()) / EVERY
        names = {"job": job.name, "structure": job.structure, "devices": devices, "shards": S}
        seconds = step | applied | refresh | {"overhead": added / sum(step.values())}
        yield names | {"metric_bytes": WIDTH * max(held)} | seconds


def _apply_flops(metric: Metric, shards: int) -> int:
    """Of one `U g` on the rank with the most arithmetic; an inner step pulls back too, which is twice as much."""
    owner = owners(metric.groups, shards)
    most = 0
    for shard in range(shards):
        part = metric.part({name for name, own in owner.items() if own == shard}, Placement())
        with FlopCounterMode(display=False) as counter:
            for group, factors in zip(part.groups, part.factors(), strict=True):
                group.apply(factors, group.blank(torch.float32, torch.device("meta")))
        most = max(most, counter.get_total_flops())
    return most


def as_table(found: list[dict[str, Any]]) -> Table:
    numbers = [
        Column("devices", "devices", "{}"),
        Column("S", "shards", "{}"),
        Column("U MiB", "metric_bytes", "{:,.0f}", IN_MIB),
        Column("two passes ms", "step_compute", "{:,.1f}", 1e3),
        Column("their traffic ms", "step_traffic", "{:,.1f}", 1e3),
        Column("two U g ms", "apply_compute", "{:,.1f}", 1e3),
        Column("their traffic ms", "apply_traffic", "{:,.1f}", 1e3),
        Column("refresh s", "refresh_compute", "{:.2f}"),
        Column("its traffic s", "refresh_traffic", "{:.2f}"),
        Column("added", "overhead", "{:.1f} %", 100),
    ]
    rows = [{"training": cost["job"]} | cost for cost in found]
    return number_table("LLQR+SAM on many devices, on paper", rows, ("training", "structure"), numbers)

"""The paper's storage table, counted from the layout of the metric: no factor is allocated.

The paper has e-kfac and diag-kfac on three ViTs. Beside them stand the cheaper forms of e-kfac, and ResNet-18, where
e-kfac has bases of 4608 x 4608 for the long side of a convolution.

Every number is held in float32. A metric is split evenly over ``shards`` devices, each of which holds the whole model:
``parameters + scalars / shards`` numbers per device.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.box import SIMPLE
from rich.table import Table

from llqr import Metric
from llqr.lab import models

# The paper's "ViT-Ti/16" has the parameters of the 64-pixel, 200-class network with patches of 8.
NETWORKS: dict[str, tuple[str, dict[str, int]]] = {
    "ViT-Ti/16": ("vit-ti", {"image_size": 64, "patch": 8, "classes": 200}),
    "ViT-B/16": ("vit-b", {}),
    "ViT-L/16": ("vit-l", {}),
    "ResNet-18": ("resnet18", {"classes": 100}),
}
STRUCTURES = ("e-kfac", "e-kfac-one-sided", "e-kfac-channels", "diag-kfac")
SHARDS = (1, 4)
MIB = 2**20


@dataclass(frozen=True)
class Storage:
    """One row: the memory of a network and its metric on each of ``shards`` devices."""

    model: str
    structure: str
    shards: int
    model_params: int
    precond_params: int

    @property
    def precond_mib(self) -> float:
        return self.precond_params * torch.float32.itemsize / self.shards / MIB

    @property
    def total_mib(self) -> float:
        return self.model_params * torch.float32.itemsize / MIB + self.precond_mib

    def to_dict(self) -> dict[str, Any]:
        """The row as the paper prints it, with two decimals."""
        sizes = {"precond_mib": round(self.precond_mib, 2), "total_mib": round(self.total_mib, 2)}
        return asdict(self) | sizes


def rows() -> list[Storage]:
    """The table; the paper's rows are in its order."""
    table = []
    for title, (name, options) in NETWORKS.items():
        with torch.device("meta"):
            model = models.build(name, **options)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        for structure in STRUCTURES:
            scalars = Metric(model, structure=structure).stored()
            table += [Storage(title, structure, shards, parameters, scalars) for shards in SHARDS]
    return table


def as_table(found: list[Storage]) -> Table:
    """The rows for a terminal."""
    table = Table(title="fp32 storage per device", box=SIMPLE, padding=(0, 1, 0, 0))
    for heading in ("model", "structure", "S", "parameters", "scalars of U", "U MiB", "total MiB"):
        table.add_column(heading, justify="left" if heading in ("model", "structure") else "right", no_wrap=True)
    for row in found:
        counts = (f"{row.shards}", f"{row.model_params:,}", f"{row.precond_params:,}")
        table.add_row(row.model, row.structure, *counts, f"{row.precond_mib:,.2f}", f"{row.total_mib:,.2f}")
    return table

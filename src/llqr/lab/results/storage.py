"""The paper's storage table, counted from the layout of the metric: no factor is allocated.

The paper has e-kfac and diag-kfac on three ViTs. Beside them stand the cheaper forms of e-kfac, and ResNet-18, where
e-kfac has bases of 4608 x 4608 for the long side of a convolution.

Every number is held in float32. A metric is shared out among ``shards`` devices, each of which holds the whole model;
the device that gets most is the one that is counted. The paper divides by the number of devices; here it is the
library's own assignment of blocks (``Geometry(shards=...)``), planned on the meta device.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from rich.table import Table

from llqr import Metric
from llqr.distributed.placement import owners
from llqr.lab import models
from llqr.lab.errors import ConfigurationError
from llqr.lab.number_table import IN_MIB, Column, number_table

# The paper's "ViT-Ti/16" has the parameters of the 64-pixel, 200-class network with patches of 8.
NETWORKS: dict[str, tuple[str, dict[str, int]]] = {
    "ViT-Ti/16": ("vit-ti", {"image_size": 64, "patch": 8, "classes": 200}),
    "ViT-B/16": ("vit-b", {}),
    "ViT-L/16": ("vit-l", {}),
    "ResNet-18": ("resnet18", {"classes": 100}),
}
STRUCTURES = ("e-kfac", "e-kfac-one-sided", "e-kfac-channels", "diag-kfac")
SHARDS = (1, 4)
KEYS = ("model", "structure", "shards", "model_params", "precond_params", "precond_mib", "total_mib")
BYTES = torch.float32.itemsize


def rows(shards: Sequence[int] = SHARDS) -> list[dict[str, Any]]:
    """One row per network, structure and number of devices, in the paper's order and with its two decimals."""
    table = []
    for title, (name, options) in NETWORKS.items():
        with torch.device("meta"):
            model = models.build(name, **options)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        for structure in STRUCTURES:
            metric = Metric(model, structure=structure, max_side=sys.maxsize)  # what the row is named after
            for count in shards:
                held = max(scalars_of_shards(metric, count))
                sizes = [round(BYTES * IN_MIB * scalars, 2) for scalars in (held, parameters + held)]
                row = (title, structure, count, parameters, metric.stored(), *sizes)
                table.append(dict(zip(KEYS, row, strict=True)))
    return table


def scalars_of_shards(metric: Metric, shards: int) -> list[int]:
    """The scalars of ``U`` that each device holds."""
    try:
        owner = owners(metric.groups, shards)
    except ValueError as error:
        raise ConfigurationError(f"--{error}.") from error
    held = ({name for name, at in owner.items() if at == shard} for shard in range(shards))
    return [metric.part(names, metric.placement).stored() for names in held]


def as_table(found: Sequence[dict[str, Any]]) -> Table:
    numbers = [
        Column("S", "shards", "{}"),
        Column("parameters", "model_params", "{:,}"),
        Column("scalars of U", "precond_params", "{:,}"),
        Column("U MiB", "precond_mib", "{:,.2f}"),
        Column("total MiB", "total_mib", "{:,.2f}"),
    ]
    return number_table("fp32 storage per device", found, ("model", "structure"), numbers)

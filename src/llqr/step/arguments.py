"""Whether what an optimizer is made of fits together: each check says in one sentence what does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llqr.dtensors import any_sharded, refuse_fsdp1

if TYPE_CHECKING:
    from llqr.geometry import GeometryLike


def check_parameters(parameters: Sequence[Tensor], *, own_probes: bool) -> None:
    """`own_probes` says whether the probe is to be each rank's own."""
    refuse_fsdp1(parameters)
    if own_probes and any_sharded(parameters):
        raise ValueError(
            "no_sync: a probe of each rank's own (m-sharpness) needs the whole weights on every rank, but they are "
            "sharded; leave it out, or use DDP"
        )


def check_geometry(geometry: GeometryLike, base: torch.optim.Optimizer) -> None:
    if not hasattr(geometry, "transport"):
        raise TypeError(f"geometry: expected a llqr.Geometry, got {type(geometry).__name__}")
    known: Mapping[str, Tensor] | None = getattr(geometry, "parameters", None)
    if known is None:
        return
    mine = {parameter for group in base.param_groups for parameter in group["params"]}
    if mine.isdisjoint(known.values()):
        raise ValueError(
            "geometry: none of its parameters is one of the optimizer's, so that U would never be applied; make both "
            "from the same model, after its weights are in place"
        )

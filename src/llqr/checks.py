"""Every check of arguments, each called once; a check says in one sentence what does not fit and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import torch
from torch import Tensor, nn

from llqr.distributed.dtensors import any_sharded, refuse_fsdp1
from llqr.step.wrapper import Wrapper

if TYPE_CHECKING:
    from llqr.geometry import GeometryLike


class Settings(TypedDict, total=False):
    """Keyword arguments every named method passes on to `Optimizer`."""

    model: nn.Module | None
    no_sync: Callable[[], AbstractContextManager[Any]] | None
    same_dropout: bool
    buffers: Literal["centre", "probe"]


def refuse_class(method: str, given: Iterable[Any]) -> None:
    """Say how it is done here: other packages make the base optimizer themselves, of a class that they are given."""
    for kind in given:
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
            raise TypeError(
                f"base: expected an optimizer, not parameters and a class: write "
                f"llqr.{method}(torch.optim.{kind.__name__}(parameters, lr=...), rho=...)"
            )


def check_base(base: torch.optim.Optimizer) -> None:
    if not isinstance(base, torch.optim.Optimizer):
        raise TypeError(f"base: expected a torch.optim.Optimizer, got {type(base).__name__}")
    if isinstance(base, Wrapper):
        raise TypeError(f"base: {type(base).__name__} is a wrapper already; pass the optimizer inside, its `base`")
    if isinstance(base, torch.optim.LBFGS):
        raise TypeError("base: LBFGS calls the closure by itself and cannot be wrapped")


def check_settings(transport: bool, model: nn.Module | None, no_sync: Any, same_dropout: bool, buffers: str) -> None:
    if buffers not in ("centre", "probe"):
        raise ValueError(f"buffers: expected 'centre' or 'probe', got {buffers!r}")
    if not isinstance(transport, bool):
        raise TypeError(f"transport: expected True or False, got {transport!r}")
    if not isinstance(same_dropout, bool):
        raise TypeError(f"same_dropout: expected True or False, got {same_dropout!r}")
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    if no_sync is not None and not callable(no_sync):
        raise TypeError(f"no_sync: expected a function, such as ddp_model.no_sync, got {type(no_sync).__name__}")


def check_closure(closure: Any) -> None:
    if closure is not None and not callable(closure):
        raise TypeError(
            f"closure: expected a function that computes the loss, got {type(closure).__name__}; a batch to learn from "
            "is step(closure, batch=...)"
        )


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

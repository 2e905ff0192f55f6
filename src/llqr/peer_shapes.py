"""Constructors in the shape of other libraries, `SAM(parameters, torch.optim.SGD, rho=0.05, lr=0.1)`: what to write."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec

import torch
from torch import nn

Arguments = ParamSpec("Arguments")

#: Settings of torch's optimizers, which the other libraries take beside those of the method.
OF_BASE = ("lr", "momentum", "dampening", "nesterov", "betas", "eps", "weight_decay", "amsgrad", "fused")


def takes_an_optimizer(init: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Refuse parameters and a class where a constructed optimizer belongs, and name the call that was meant."""

    @functools.wraps(init)
    def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        method, *given = args
        given += [kwargs[name] for name in ("params", "base_optimizer") if name in kwargs]
        kind = next((one for one in given[1:] if isinstance(one, type)), None)
        if kind is not None or (given and isinstance(given[0], Iterator | Sequence | nn.Module)):
            meant = _rewritten(type(method).__name__, kind, kwargs)
            raise TypeError(f"base: expected a constructed optimizer; write {meant}")
        init(*args, **kwargs)

    return checked


def _rewritten(method: str, kind: type | None, settings: Mapping[str, Any]) -> str:
    base = "SGD" if kind is None else kind.__name__
    base = f"torch.optim.{base}" if hasattr(torch.optim, base) else base
    of_base = "".join(f", {name}={settings[name]!r}" for name in OF_BASE if name in settings)
    of_method = ", geometry" if method.startswith("LLQR") else ""
    of_method += f", rho={settings['rho']!r}" if "rho" in settings else ""
    method = "ASAM" if settings.get("adaptive") else method
    return f"llqr.{method}({base}(model.parameters(){of_base}){of_method})"

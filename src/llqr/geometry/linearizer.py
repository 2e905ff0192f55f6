"""From a batch to the quadratic model that a refresh learns from."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from llqr.curvature import (
    ENGINES,
    Batch,
    Divergence,
    Engine,
    Forward,
    Loss,
    Problem,
    QuadraticModel,
    Ranks,
    choose_engine,
    frozen,
)
from llqr.curvature.divergence import Scale
from llqr.geometry.runtime import Runtime
from llqr.refresh.report import RefreshWarning


class Linearizer:
    """A model and a loss, and the engine that makes quadratic models of them, averaged over the ranks.

    Attributes:
        model: the network inside `torch.compile` and DDP.
        parameters: those that require a gradient, by name.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Loss,
        divergence: Divergence,
        runtime: Runtime,
        *,
        scale: Scale | None = None,
        gradients: int = 1,
        forward: Forward | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
        if not callable(loss_fn):
            raise TypeError(f"loss_fn: expected a function of outputs and targets, got {type(loss_fn).__name__}")
        self.model: nn.Module = unwrapped(model)
        self.parameters: dict[str, Tensor] = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise ValueError("model: no parameter requires a gradient")
        for name, parameter in self.parameters.items():
            if parameter.is_complex():
                raise ValueError(f"model: parameter {name!r} is complex, which a metric does not support")
        self.divergence = divergence
        self._loss_fn, self._forward = loss_fn, forward
        self._runtime, self._scale, self._gradients = runtime, scale, gradients
        self._ranks = _ranks(model, runtime, summed=(divergence.scale if scale is None else scale) == "sum")
        self._engine: Engine | None = None
        self.use(runtime.engine)

    @property
    def engine(self) -> str:
        """The engine's name; "auto" until the first refresh has chosen one."""
        return "auto" if self._engine is None else self._engine.name

    def use(self, engine: str) -> None:
        """Take the engine of this name from now on."""
        if engine != self.engine:
            self._engine = None if engine == "auto" else self._made(ENGINES[engine])

    def _made(self, kind: type[Engine]) -> Engine:
        return kind(self.divergence, self._scale, gradients=self._gradients, compile=self._runtime.compile)

    def problem(self, batch: Batch) -> Problem:
        """Model, loss and batch as a function of the parameters."""
        return Problem(
            self.model,
            self._loss_fn,
            batch,
            self.parameters,
            forward=self._forward,
            micro_batch=self._runtime.micro_batch,
            autocast=self._runtime.autocast,
        )

    def linearise(self, problem: Problem) -> QuadraticModel:
        """The quadratic model of a problem; under DDP that of all ranks' batches together."""
        device = next(iter(self.parameters.values())).device
        ranks = None if self._ranks is None or not self._ranks.several else self._ranks
        engine = self._engine = self._engine or self._made(self._choose(problem, ranks, device))
        if ranks is None:
            return engine.linearise(problem)
        return ranks.joined(lambda: engine.linearise(problem), device)

    def _choose(self, problem: Problem, ranks: Ranks | None, device: torch.device) -> type[Engine]:
        """The first engine that the model supports, on all ranks."""

        def choice() -> tuple[type[Engine], list[str]]:
            return choose_engine(problem, self.divergence, self._scale)

        kind, refused = choice() if ranks is None else ranks.all_or_none(choice, device)
        if ranks is not None:
            order = list(ENGINES.values())
            kind = order[ranks.largest(order.index(kind), device)]
        if not kind.exact:
            warnings.warn(
                f"engine: chose {kind.name}, which is approximate, because {'; '.join(refused)}",
                RefreshWarning,
                stacklevel=8,
            )
        return kind

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """While entered, the model is in eval mode, and the caller's precision does not count; put back at the end."""
        device = next(iter(self.parameters.values())).device
        with frozen(self.model, device), torch.no_grad(), torch.autocast(device.type, enabled=False):
            yield


def _ranks(model: nn.Module, runtime: Runtime, summed: bool) -> Ranks | None:
    """Those of `Runtime.process_group`, or of the DDP wrapper; None if the model is this process's alone."""
    if runtime.process_group is not None:
        return Ranks(runtime.process_group, summed)
    while not isinstance(model, nn.parallel.DistributedDataParallel):
        inner = getattr(model, "_orig_mod", None)
        if inner is None:
            return None
        model = inner
    return Ranks(model.process_group, summed)


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside `torch.compile` and (Distributed)DataParallel, with the plain names and derivatives."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner

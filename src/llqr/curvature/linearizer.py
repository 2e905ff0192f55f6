"""From a batch to the quadratic model that a refresh learns from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llqr.caller_warnings import warn
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
from llqr.curvature.batch import opened
from llqr.curvature.divergence import Scale
from llqr.curvature.first_refresh import check_loss, check_model, try_out
from llqr.curvature.passes import ShardedProblem
from llqr.curvature.uncompiled import as_written
from llqr.distributed.dtensors import any_sharded, drop_gathered
from llqr.distributed.fsdp import fsdp_group
from llqr.distributed.placement import Placement
from llqr.geometry.arguments import check_functions, check_pieces, check_ranks, check_weights
from llqr.geometry.runtime import Runtime
from llqr.refresh.report import RefreshWarning

T = TypeVar("T")


class Linearizer:
    """A model and a loss, and the engine that makes quadratic models of them, averaged over the ranks.

    Attributes:
        model: the network inside `torch.compile` and DDP.
        parameters: those that require a gradient, by name.
        ranks: the processes that train this model together, as far as they are known.
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
        loss_fn = as_written(loss_fn)
        check_functions(model, loss_fn, forward)
        self.model, group = unwrapped(model)
        self._ddp = None if group is None else ref(model)  # not held, because it cannot be copied
        drop_gathered(self.model.modules())
        self.parameters: dict[str, Tensor] = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        check_weights(self.model, self.parameters)
        if runtime.micro_batch is not None:
            check_pieces(self.model)
        self.divergence = divergence
        self._loss_fn, self._forward = loss_fn, forward
        self._runtime, self._scale, self._gradients = runtime, scale, gradients
        self._summed = (divergence.scale if scale is None else scale) == "sum"
        if any_sharded(self.parameters.values()):
            group = fsdp_group(self.parameters)
        elif runtime.process_group is not None:
            group = runtime.process_group
        self.ranks = self._together(group)
        self._engine: Engine | None = None
        self._checked = False
        self._written: tuple[frozenset[str], list[str]] = frozenset(), []
        self._loss_modules: list[nn.Module] = []
        self.use(runtime.engine)

    @property
    def device(self) -> torch.device:
        """That of the first parameter."""
        return next(iter(self.parameters.values())).device

    @property
    def engine(self) -> str:
        """The engine's name; "auto" until the first refresh has chosen one."""
        return "auto" if self._engine is None else self._engine.name

    def use(self, engine: str) -> None:
        """Take the engine of this name from now on."""
        if engine == self.engine:
            return
        if engine != "auto" and ENGINES[engine].of_shards and not any_sharded(self.parameters.values()):
            raise ValueError(f"engine: {engine!r} is for models sharded by FSDP2 (fully_shard); choose 'auto'")
        self._engine = None if engine == "auto" else self._made(ENGINES[engine])

    def resume(self, engine: str) -> None:
        """Take the engine of a saved run where `Runtime` leaves the choice open and the engine suits it."""
        runtime, kind = self._runtime, ENGINES.get(engine)
        if runtime.engine != "auto" or (kind is not None and kind.of_shards):
            return
        if kind is None or kind.micro_batches or runtime.micro_batch is None:
            self.use(engine)

    def _made(self, kind: type[Engine]) -> Engine:
        return kind(self.divergence, self._scale, gradients=self._gradients, compile=self._runtime.compile)

    @property
    def _of_shards(self) -> bool:
        return self._engine is not None and self._engine.of_shards

    def problem(self, batch: Batch) -> Problem:
        """Model, loss and batch as a function of the parameters."""
        if self.engine == "linearised":  # which must know every tensor of the batch
            batch = opened(batch)
        given, forward, autocast = (self.model, self._loss_fn, batch), self._forward, self._runtime.autocast
        if self._of_shards:
            assert self.ranks.group is not None
            return ShardedProblem(*given, self.parameters, self.ranks.group, forward=forward, autocast=autocast)
        micro_batch = self._runtime.micro_batch
        return Problem(*given, self.parameters, forward=forward, micro_batch=micro_batch, autocast=autocast)

    def learn_with(self, group: dist.ProcessGroup) -> None:
        """Learn one metric with these ranks, unless others are known: for frameworks that wrap the model later."""
        if self.ranks.group is None:
            self.ranks = self._together(group)

    def _together(self, group: dist.ProcessGroup | None) -> Ranks:
        ranks = Ranks(group, Placement(group), self._summed)
        if not ranks.alone:
            check_ranks(self.model)
        return ranks

    def share_out(self, placement: Placement) -> None:
        """From now on quadratic models have the vectors of this rank's part of the metric."""
        self.ranks = replace(self.ranks, exchange=placement, shared_out=True)

    def on_any_rank(self, flag: bool) -> bool:
        """Whether it is so on any of them."""
        return bool(self.ranks.largest(flag, self.device))

    def agreed(self, action: Callable[[], T]) -> T:
        """What an action returns, if it succeeds on all ranks; otherwise all of them raise."""
        return self.ranks.all_or_none(action, self.device)

    def linearise(self, problem: Problem) -> QuadraticModel:
        """The quadratic model of a problem; under DDP that of all ranks' batches together."""
        self._check_join()
        problem.keeps_outputs = not self._checked
        if not self._checked and not self._of_shards:
            self.agreed(lambda: try_out(problem))
            self._written, self._loss_modules = (problem.written, problem.replaced), problem.loss_modules
        problem.written, problem.replaced = self._written
        problem.loss_modules = self._loss_modules or problem.loss_modules
        if self._engine is None:
            self._warn_of_own_metrics()
            self._engine = self._made(self._choose(problem))
        if self._of_shards:
            model = self.ranks.carried(self._local(problem), problem.parameters)
        else:
            model = self.ranks.joined(lambda: self._local(problem), self.device)
        self._checked = True  # on all ranks or, if one of them has failed, on none
        return model

    def _check_join(self) -> None:
        """Ranks that have left the loop answer the collectives of DDP's passes, but not those of a refresh."""
        join = getattr(self._ddp and self._ddp(), "_join_config", None)
        if join is not None and join.enable and not join.throw_on_early_termination and not self.ranks.alone:
            raise ValueError(
                "model: no refresh within its join(), where ranks without batches do not take part in it; give all "
                "ranks as many batches, or use join(throw_on_early_termination=True)"
            )

    def _warn_of_own_metrics(self) -> None:
        """Frameworks wrap a model in DDP after the geometry was made, so that the ranks would drift apart unnoticed."""
        if self.ranks.group is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            warn(
                "model: it is not wrapped in DDP, so that every process learns a metric of its own; if they train one "
                "model, pass the wrapped model or Runtime(process_group=torch.distributed.group.WORLD)",
                RefreshWarning,
            )

    def _local(self, problem: Problem) -> QuadraticModel:
        """The quadratic model of this process's own batch."""
        assert self._engine is not None
        try:
            model = self._engine.linearise(problem)
            if not self._checked:
                check_model(problem, model, self._is_zero, curvature_is_sum=self._summed)
        except (NotImplementedError, RuntimeError) as error:
            if "implemented" not in str(error) or "implemented for '" in str(error):  # the latter names a dtype
                raise
            reason = str(error).splitlines()[0]
            raise RuntimeError(
                f"engine: torch lacks derivatives that {self.engine!r} needs here ({reason}); choose 'auto'"
            ) from error
        return model

    def _is_zero(self, named: Mapping[str, Tensor]) -> bool:
        """Whether a vector is zero; a vector of shards must be zero on all ranks, some of which may hold nothing."""
        found = any(bool(part.any()) for part in named.values())
        return not (self.on_any_rank(found) if self._of_shards else found)

    def _choose(self, problem: Problem) -> type[Engine]:
        """The first engine that the model supports, on all ranks."""

        def choice() -> tuple[type[Engine], list[str]]:
            try:
                return choose_engine(problem, self.divergence, self._scale)
            except RuntimeError as error:
                failure = error
            check_loss(problem)  # here, so that its error does not show that of the engines
            raise failure

        kind, refused = self.agreed(choice)
        order = list(ENGINES.values())
        kind = order[self.ranks.largest(order.index(kind), self.device)]
        if not kind.exact:
            warn(f"engine: chose {kind.name}, which is approximate, because {'; '.join(refused)}", RefreshWarning)
        return kind

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """While entered, the model is in eval mode, and the caller's precision does not count; put back at the end."""
        with frozen(self.model, self.device), torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            yield


def unwrapped(model: nn.Module) -> tuple[nn.Module, dist.ProcessGroup | None]:
    """The module inside `torch.compile` and (Distributed)DataParallel, with the plain names; and the ranks of DDP."""
    group: dist.ProcessGroup | None = None
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner, group = model.module, getattr(model, "process_group", None)
        if inner is None:
            return model, group
        model = inner

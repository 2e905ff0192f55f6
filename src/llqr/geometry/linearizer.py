"""From a batch to the quadratic model that a refresh learns from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

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
from llqr.curvature.derivatives import UnconnectedError
from llqr.curvature.divergence import Scale
from llqr.curvature.loss_checks import doubles_with_the_batch, ignored_but_counted
from llqr.curvature.passes import ShardedProblem
from llqr.curvature.problem import summed
from llqr.curvature.uncompiled import as_written
from llqr.dtensors import any_sharded, drop_gathered, refuse_fsdp1
from llqr.geometry.fsdp import check_fsdp, fsdp_group
from llqr.geometry.runtime import Runtime
from llqr.metric.placement import Placement
from llqr.refresh.report import RefreshWarning

T = TypeVar("T")


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
        if forward is not None and not callable(forward):
            raise TypeError(f"forward: expected a function of the model and its inputs, got {type(forward).__name__}")
        loss_fn = as_written(loss_fn)
        if summed(loss_fn):
            raise ValueError("loss_fn: it is a sum over the batch (reduction='sum'), expected the mean loss")
        self.model: nn.Module = unwrapped(model)
        drop_gathered(self.model.modules())
        self.parameters: dict[str, Tensor] = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise ValueError("model: no parameter requires a gradient")
        for name, parameter in self.parameters.items():
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise ValueError(
                    f"model: parameter {name!r} has no shape yet (a lazy module); call the model on a batch before the "
                    "geometry is made"
                )
        refuse_fsdp1(self.parameters.values())
        if any_sharded(self.parameters.values()):
            check_fsdp(self.model, self.parameters)
        for name, parameter in self.parameters.items():
            if parameter.is_complex():
                raise ValueError(f"model: parameter {name!r} is complex, which a metric does not support")
        for name in _without_statistics(self.model, _BatchNorm) if runtime.micro_batch is not None else ():
            raise ValueError(
                f"micro_batch: {name!r} has no running statistics, so that its outputs depend on the whole batch; "
                "let it track them, or leave micro_batch out"
            )
        self.divergence = divergence
        self._loss_fn, self._forward = loss_fn, forward
        self._runtime, self._scale, self._gradients = runtime, scale, gradients
        self._summed = (divergence.scale if scale is None else scale) == "sum"
        group = fsdp_group(self.parameters) if any_sharded(self.parameters.values()) else _group(model, runtime)
        self._ranks = None if group is None else self._together(group)
        self._engine: Engine | None = None
        self._checked = self._shared_out = False
        self._written: tuple[frozenset[str], list[str]] = frozenset(), []
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
        """Take the engine of a saved run, unless only one of the two works on shards: that is for `Runtime` to say."""
        if self._of_shards == (engine != "auto" and ENGINES[engine].of_shards):
            self.use(engine)

    def _made(self, kind: type[Engine]) -> Engine:
        return kind(self.divergence, self._scale, gradients=self._gradients, compile=self._runtime.compile)

    @property
    def _of_shards(self) -> bool:
        return self._engine is not None and self._engine.of_shards

    def problem(self, batch: Batch) -> Problem:
        """Model, loss and batch as a function of the parameters."""
        given, forward, autocast = (self.model, self._loss_fn, batch), self._forward, self._runtime.autocast
        if self._of_shards:
            assert self.group is not None
            return ShardedProblem(*given, self.parameters, self.group, forward=forward, autocast=autocast)
        micro_batch = self._runtime.micro_batch
        return Problem(*given, self.parameters, forward=forward, micro_batch=micro_batch, autocast=autocast)

    def learn_with(self, group: dist.ProcessGroup) -> None:
        """Learn one metric with these ranks, unless others are known: for frameworks that wrap the model later."""
        if self._ranks is None:
            self._ranks = self._together(group)

    def _together(self, group: dist.ProcessGroup) -> Ranks:
        ranks = Ranks(group, Placement(group), self._summed)
        for name in _without_statistics(self.model, nn.SyncBatchNorm) if ranks.several else ():
            raise ValueError(
                f"model: {name!r} is a SyncBatchNorm without running statistics, which in a refresh would take "
                "those of each rank's own batch; let it track them"
            )
        return ranks

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The processes that train this model together, as far as they are known."""
        return None if self._ranks is None else self._ranks.group

    def place(self) -> list[int]:
        """This process's place among the ranks, and how many there are."""
        return [0, 1] if self.ranks is None else [dist.get_rank(self.group), dist.get_world_size(self.group)]

    @property
    def ranks(self) -> Ranks | None:
        """Those that learn one metric together, if there are several, or one that has been given its part."""
        return self._ranks if self._ranks is not None and (self._ranks.several or self._shared_out) else None

    def on_any_rank(self, flag: bool) -> bool:
        """Whether it is so on any of them."""
        ranks = self.ranks
        return flag if ranks is None else bool(ranks.largest(flag, self.device))

    def agreed(self, action: Callable[[], T]) -> T:
        """What an action returns, if it succeeds on all ranks; otherwise all of them raise."""
        ranks = self.ranks
        return action() if ranks is None else ranks.all_or_none(action, self.device)

    def share_out(self, placement: Placement) -> None:
        """From now on quadratic models have the vectors of this rank's part of the metric."""
        assert self._ranks is not None
        self._ranks = replace(self._ranks, exchange=placement)
        self._shared_out = True

    def linearise(self, problem: Problem) -> QuadraticModel:
        """The quadratic model of a problem; under DDP that of all ranks' batches together."""
        ranks = self.ranks
        problem.keeps_outputs = not self._checked
        if not self._checked and not self._of_shards:
            self.agreed(lambda: _try(problem))
            self._written = problem.written, problem.replaced
        problem.written, problem.replaced = self._written
        if self._engine is None:
            self._warn_of_own_metrics()
            self._engine = self._made(self._choose(problem, ranks))
        if ranks is None:
            model = self._local(problem)
        elif self._of_shards:
            model = ranks.carried(self._local(problem), problem.parameters)
        else:
            model = ranks.joined(lambda: self._local(problem), self.device)
        self._checked = True  # on all ranks or, if one of them has failed, on none
        return model

    def _warn_of_own_metrics(self) -> None:
        """Frameworks wrap a model in DDP after the geometry was made, so that the ranks would drift apart unnoticed."""
        if self._ranks is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            warn(
                "model: it is not wrapped in DDP, so that every process learns a metric of its own; if they train one "
                "model, pass the wrapped model or Runtime(process_group=torch.distributed.group.WORLD)",
                RefreshWarning,
            )

    def _local(self, problem: Problem) -> QuadraticModel:
        """The quadratic model of this process's own batch."""
        assert self._engine is not None
        model = self._engine.linearise(problem)
        if not self._checked:
            self._check(problem, model)
        return model

    def _check(self, problem: Problem, model: QuadraticModel) -> None:
        """At the first refresh: refuse a model, or warn of a loss, from which the wrong metric or none is learned."""
        if any(part.is_cuda for part in model.gradient.values()) and torch.cuda.is_current_stream_capturing():
            return
        if bypassed := problem.bypassed():
            raise UnconnectedError(bypassed)
        with torch.no_grad():
            if doubles_with_the_batch(problem):
                warn(
                    "loss_fn: it doubles when every sample is taken twice, so that it seems to be a sum over the "
                    "batch, where the mean is expected",
                    RefreshWarning,
                )
            if self._summed and (silent := ignored_but_counted(problem)):
                warn(
                    f"loss_fn: it ignores the targets {', '.join(map(str, silent))}, but does not say so, and they "
                    "count as terms of its mean, by which the curvature is scaled; pass "
                    f"functools.partial(F.cross_entropy, ignore_index={silent[0]}), or a loss with that attribute",
                    RefreshWarning,
                )
            problem.keeps_outputs, problem.seen = False, None
            if not self._zero(model.gradient) and self._zero(model.product(model.gradient)):
                warn(
                    "loss_fn: the curvature along the gradient is zero, as that of a loss that is linear in the "
                    "outputs is (does forward= return the loss itself?), so that U only grows; instead of nll_loss of "
                    "log-probabilities pass cross_entropy, which is the same number and has a curvature",
                    RefreshWarning,
                )

    def _zero(self, named: Mapping[str, Tensor]) -> bool:
        """Whether a vector is zero; a vector of shards must be zero on all ranks, some of which may hold nothing."""
        found = any(bool(part.any()) for part in named.values())
        return not (self.on_any_rank(found) if self._of_shards else found)

    def _choose(self, problem: Problem, ranks: Ranks | None) -> type[Engine]:
        """The first engine that the model supports, on all ranks."""

        def choice() -> tuple[type[Engine], list[str]]:
            try:
                return choose_engine(problem, self.divergence, self._scale)
            except RuntimeError as error:
                failure = error
            _check_loss(problem)  # here, so that its error does not show that of the engines
            raise failure

        kind, refused = self.agreed(choice)
        if ranks is not None:
            order = list(ENGINES.values())
            kind = order[ranks.largest(order.index(kind), self.device)]
        if not kind.exact:
            warn(
                f"engine: chose {kind.name}, which is approximate, because {'; '.join(refused)}",
                RefreshWarning,
            )
        return kind

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """While entered, the model is in eval mode, and the caller's precision does not count; put back at the end."""
        with frozen(self.model, self.device), torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            yield


def _group(model: nn.Module, runtime: Runtime) -> dist.ProcessGroup | None:
    """`Runtime.process_group`, or that of the DDP wrapper; None if the model is this process's alone."""
    if runtime.process_group is not None:
        return runtime.process_group
    while not isinstance(model, nn.parallel.DistributedDataParallel):
        inner = getattr(model, "_orig_mod", None)
        if inner is None:
            return None
        model = inner
    group: dist.ProcessGroup = model.process_group
    return group


def _try(problem: Problem) -> None:
    """Find out what the model writes to, and refuse a batch that it cannot be called on."""
    try:
        problem.find_writes()
    except (torch.OutOfMemoryError, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
        raise
    except RuntimeError:
        _check_runs(problem)  # there are operations that torch does not let anyone look at, as in flex_attention
    if problem.mixes_samples():
        raise ValueError(
            "micro_batch: the outputs of a sample depend on the samples before it (is the batch another dimension than "
            "the first?), so that pieces would give other outputs; leave micro_batch out"
        )


def _check_runs(problem: Problem) -> None:
    """Say so if the model itself does not run, and not one of its derivatives."""
    with torch.no_grad():
        try:
            problem.outputs(problem.parameters, problem.pieces[0])
        except NotImplementedError:
            return
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise RuntimeError(f"batch: the model cannot be called on its inputs ({reason})") from error


def _check_loss(problem: Problem) -> None:
    """Say so if the loss itself cannot be computed, and not one of its derivatives."""
    try:
        with torch.no_grad():
            outputs = [problem.outputs(problem.parameters, piece) for piece in problem.pieces]
        with torch.enable_grad():
            whole = (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).requires_grad_()
            loss = problem.loss(whole)
            slope = torch.autograd.grad(loss, whole, create_graph=True)[0] if loss.requires_grad else None
    except (torch.OutOfMemoryError, NotImplementedError, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
        return
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise RuntimeError(f"loss_fn: it cannot be computed from the outputs and the targets ({reason})") from error
    if slope is None:
        raise RuntimeError("loss_fn: it does not depend on the outputs; does it detach them?")
    try:
        torch.autograd.grad(slope, whole, slope.detach(), materialize_grads=True)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise RuntimeError(
            f"loss_fn: torch cannot differentiate it twice ({reason}), which the curvature is made of; write it in "
            "elementary operations"
        ) from error


def _without_statistics(model: nn.Module, kind: type[_BatchNorm]) -> list[str]:
    """The norms of this kind that take the statistics of their batch, in eval mode too."""
    return [name for name, own in model.named_modules() if isinstance(own, kind) and own.running_mean is None]


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside `torch.compile` and (Distributed)DataParallel, with the plain names and derivatives."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner

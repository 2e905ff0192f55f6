"""From a batch to the quadratic model that a refresh learns from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from llqr.caller_warnings import warn
from llqr.curvature.batch import Batch, Loss, is_sum, opened, samples_in, taken_rows, tensors_of
from llqr.curvature.curvature import Curvature, automatic, choose_engine
from llqr.curvature.derivatives import ENGINES
from llqr.curvature.divergence import Divergence
from llqr.curvature.problem import Forward, Problem, frozen
from llqr.curvature.quadratic import QuadraticModel
from llqr.distributed.dtensors import any_sharded, drop_gathered, refuse_fsdp1
from llqr.distributed.fsdp import check_fsdp, fsdp_group
from llqr.distributed.placement import Owned
from llqr.distributed.ranks import Ranks
from llqr.metric.metric import Placement
from llqr.report import RefreshWarning

if TYPE_CHECKING:
    from llqr.curvature.traced import Traces
    from llqr.runtime import Runtime

T = TypeVar("T")


class Linearizer:
    """A model, a loss and an engine: makes quadratic models, averaged over the ranks.

    Attributes:
        model: the network inside `torch.compile` and DDP.
        parameters: those that require a gradient, by name.
        ranks: the processes that train this model together, as far as they are known.
        engine: what multiplies by `H`; "auto" until the first refresh has chosen.
    """

    def __init__(
        self, model: nn.Module, loss_fn: Loss, divergence: Divergence, runtime: Runtime, forward: Forward | None
    ) -> None:
        _check_functions(model, loss_fn, forward)
        self.model, group = unwrapped(model)
        drop_gathered(self.model.modules())
        self.parameters: dict[str, Tensor] = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        _check_parameters(self.model, self.parameters)
        if runtime.micro_batch is not None:
            _check_statistics(self.model, _BatchNorm, "micro_batch", "depends on the whole batch")
        self.divergence, self.engine = divergence, runtime.engine
        self._loss_fn, self._forward, self._runtime = loss_fn, forward, runtime
        if any_sharded(self.parameters.values()):
            group = fsdp_group(self.parameters)
        elif runtime.process_group is not None:
            group = runtime.process_group
        self.ranks = self._together(group)
        self._checked = False

    @property
    def device(self) -> torch.device:
        """That of the first parameter."""
        return next(iter(self.parameters.values())).device

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """While entered, the model is in eval mode, and the caller's precision does not count; put back at the end."""
        with frozen(self.model, self.device), torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            yield

    def problem(self, batch: Batch) -> Problem:
        """Model, loss and batch as a function of the parameters."""
        if self.engine == "linearised":  # a trace must know every tensor of the batch
            batch = opened(batch)
        given, runtime = (self.model, self._loss_fn, batch, self.parameters), self._runtime
        return Problem(*given, forward=self._forward, micro_batch=runtime.micro_batch, autocast=runtime.autocast)

    def linearise(self, problem: Problem) -> QuadraticModel:
        """The quadratic model of a problem; of several ranks, that of their joined batch."""
        if not self._checked:
            self._warn_of_own_metrics()
            self.agreed(lambda: check_first_batch(problem, self.divergence))
        if self.engine == "auto":
            self.engine = self._chosen(problem)
        model = self.ranks.joined(lambda: self._local(problem), self.device)
        self._checked = True  # on all ranks or, if one of them has failed, on none
        return model

    def _local(self, problem: Problem) -> QuadraticModel:
        """The quadratic model of this process's own batch."""
        try:
            if self.engine == "linearised":
                model = self._traces.linearise(problem)
            else:
                model = Curvature(problem, self.divergence, ENGINES[self.engine]).model()
            if not self._checked:
                model.product(model.gradient)
        except RuntimeError as error:
            lacking = "forward AD" in str(error) or "implemented" in str(error)
            if not lacking or "implemented for '" in str(error):  # the latter names a dtype
                raise
            reason = str(error).splitlines()[0]
            raise RuntimeError(
                f"engine: torch lacks derivatives that {self.engine!r} needs here ({reason}); choose 'auto'"
            ) from error
        return model

    @cached_property
    def _traces(self) -> Traces:
        from llqr.curvature.traced import Traces  # slow to import, and rarely needed

        return Traces(self.divergence, compile=self._runtime.compile)

    def _chosen(self, problem: Problem) -> str:
        """The first engine that the model supports, on all ranks."""
        name, refused = self.agreed(lambda: choose_engine(problem, self.divergence))
        order = automatic(problem)  # the same on all ranks
        name = order[self.ranks.largest(order.index(name), self.device)]
        if not ENGINES[name].exact:
            warn(f"engine: chose {name}, which is approximate, because {'; '.join(refused)}", RefreshWarning)
        return name

    def resume(self, engine: str) -> None:
        """Take the engine of a saved run where `Runtime` leaves the choice open and the engine suits it."""
        if self._runtime.engine == "auto" and (engine != "linearised" or self._runtime.micro_batch is None):
            self.engine = engine

    # -- ranks ---------------------------------------------------------------------------------------------------------

    def learn_with(self, group: dist.ProcessGroup) -> None:
        """Learn one metric with these ranks, unless others are known: for frameworks that wrap the model later."""
        if self.ranks.group is None:
            self.ranks = self._together(group)

    def _together(self, group: dist.ProcessGroup | None) -> Ranks:
        ranks = Ranks(group, self.divergence.scale == "sum")
        if not ranks.alone:
            _check_statistics(self.model, nn.SyncBatchNorm, "model", "would take those of each rank's own batch")
        return ranks

    def share_out(self, placement: Placement) -> None:
        """From now on quadratic models have the vectors of this rank's part of the metric."""
        assert isinstance(placement, Owned)
        self.ranks = replace(self.ranks, placement=placement)

    def agreed(self, action: Callable[[], T]) -> T:
        """What an action returns, if it succeeds on all ranks; otherwise all of them raise."""
        return self.ranks.all_or_none(action, self.device)

    def _warn_of_own_metrics(self) -> None:
        """Frameworks wrap a model in DDP after the geometry was made, so that the ranks would drift apart unnoticed."""
        if self.ranks.group is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            warn(
                "model: it is not wrapped in DDP, so every process learns a metric of its own; if they train one "
                "model, pass the wrapped model or Runtime(process_group=torch.distributed.group.WORLD)",
                RefreshWarning,
            )


def unwrapped(model: nn.Module) -> tuple[nn.Module, dist.ProcessGroup | None]:
    """The module inside `torch.compile` and (Distributed)DataParallel, and the process group of DDP."""
    group: dist.ProcessGroup | None = None
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner, group = model.module, getattr(model, "process_group", None)
        if inner is None:
            return model, group
        model = inner


def _check_functions(model: Any, loss_fn: Any, forward: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    if not callable(loss_fn):
        raise TypeError(f"loss_fn: expected a function of outputs and targets, got {type(loss_fn).__name__}")
    if forward is not None and not callable(forward):
        raise TypeError(f"forward: expected a function of the model and its inputs, got {type(forward).__name__}")
    if is_sum(loss_fn):
        raise ValueError("loss_fn: it is a sum over the batch (reduction='sum'), expected the mean loss")


def _check_parameters(model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
    """Refuse weights for which no metric can be learned."""
    if not parameters:
        raise ValueError("model: no parameter requires a gradient")
    for name, parameter in parameters.items():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(
                f"model: parameter {name!r} has no shape yet (a lazy module); call the model on a batch before the "
                "geometry is made"
            )
        if parameter.is_complex():
            raise ValueError(f"model: parameter {name!r} is complex, which a metric does not support")
    refuse_fsdp1(parameters.values())
    if any_sharded(parameters.values()):
        check_fsdp(model, parameters)


def _check_statistics(model: nn.Module, kind: type[_BatchNorm], argument: str, consequence: str) -> None:
    """Refuse norms that take the statistics of their batch, in eval mode too, where only a part of it is computed."""
    for name, module in model.named_modules():
        if isinstance(module, kind) and module.running_mean is None:
            raise ValueError(
                f"{argument}: {name!r} is a {type(module).__name__} without running statistics, which {consequence}; "
                "let it track them"
            )


#: Smaller batches are not asked whether the loss is a sum.
FEWEST = 4


@torch.no_grad()
def check_first_batch(problem: Problem, divergence: Divergence) -> None:
    """Refuse a model, or warn of a loss, from which the wrong metric or none would be learned. Asked once."""
    tensors = [*problem.parameters.values(), *tensors_of(problem.inputs)]
    given = [tensor for tensor in tensors if not tensor.is_inference()]  # those have no version
    versions = [tensor._version for tensor in given]
    with _blaming("batch: the model cannot be called on its inputs"):
        pieces = problem.outputs_of_pieces()
    if versions != [tensor._version for tensor in given]:
        raise ValueError(
            "model: its forward pass writes to its parameters or inputs (as an embedding with max_norm does), which a "
            "refresh would do again in every product; let it write to copies"
        )
    outputs = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    what = "loss_fn: it cannot be computed from the outputs and the targets"
    with torch.enable_grad(), _blaming(what, (RuntimeError, ValueError, IndexError)):
        z = outputs.detach().requires_grad_()
        loss = problem.loss(z)
    if not loss.requires_grad:
        raise RuntimeError("loss_fn: it does not depend on the outputs; does it detach them?")
    with _blaming("loss_fn: torch cannot differentiate it twice, or cannot do so with the divergence's between="):
        (slope,) = torch.autograd.grad(loss, z)
        curved = divergence.output_hessian(problem.loss, outputs)(slope)
    if not divergence.second_order and slope.any() and not curved.any():
        warn(
            "loss_fn: the curvature along the gradient is zero, as if the loss were linear in the outputs (does "
            "forward= return the loss itself?), so U only grows; instead of nll_loss of log-probabilities pass "
            "cross_entropy, the same number with a curvature",
            RefreshWarning,
        )
    if _doubles_with_the_batch(problem, outputs):
        warn(
            "loss_fn: it doubles when every sample is taken twice, so it seems to be a sum over the batch; return the "
            "mean",
            RefreshWarning,
        )


@contextmanager
def _blaming(sentence: str, kinds: tuple[type[Exception], ...] = (RuntimeError,)) -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, torch.linalg.LinAlgError, torch.AcceleratorError):  # type: ignore[attr-defined]
        raise  # a device in trouble, or a batch that the guards reject
    except kinds as error:
        raise RuntimeError(f"{sentence} ({str(error).splitlines()[0]})") from error


def _doubles_with_the_batch(problem: Problem, outputs: Tensor) -> bool:
    """Whether the loss of every sample taken twice is twice the loss. False if it cannot be told."""
    targets = problem.targets
    if not isinstance(targets, Tensor) or not FEWEST <= (samples_in(outputs) or 0) == samples_in(targets):
        return False
    rows = torch.arange(len(outputs), device=outputs.device).repeat(2)
    try:
        once = problem.loss_fn(outputs, targets)
        twice = problem.loss_fn(*taken_rows((outputs, targets), rows))
        return bool(once != 0) and bool((twice - 2 * once).abs() <= 1e-3 * once.abs())
    except Exception:  # it knows the size of its batch, or differentiates by itself
        return False

"""Whether what a geometry is made of fits together: each check says in one sentence what does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from llqr.curvature.losses import is_sum
from llqr.distributed.dtensors import any_sharded, refuse_fsdp1
from llqr.distributed.fsdp import check_fsdp
from llqr.geometry.runtime import Runtime
from llqr.metric import Metric
from llqr.solvers import SOLVERS, Inner


def check_types(inner: Any, runtime: Any, on_refresh: Any) -> None:
    for name, given, kind in (("inner", inner, Inner), ("runtime", runtime, Runtime)):
        if not (given is None or isinstance(given, kind)):
            raise TypeError(f"{name}: expected a llqr.{kind.__name__}, got {given!r}")
    if on_refresh is not None and not callable(on_refresh):
        raise TypeError(f"on_refresh: expected a function of a report, got {type(on_refresh).__name__}")


def check_functions(model: Any, loss_fn: Any, forward: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    if not callable(loss_fn):
        raise TypeError(f"loss_fn: expected a function of outputs and targets, got {type(loss_fn).__name__}")
    if forward is not None and not callable(forward):
        raise TypeError(f"forward: expected a function of the model and its inputs, got {type(forward).__name__}")
    if is_sum(loss_fn):
        raise ValueError("loss_fn: it is a sum over the batch (reduction='sum'), expected the mean loss")


def check_weights(model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
    """Refuse weights for which no metric can be learned."""
    if not parameters:
        raise ValueError("model: no parameter requires a gradient")
    for name, parameter in parameters.items():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(
                f"model: parameter {name!r} has no shape yet (a lazy module); call the model on a batch before the "
                "geometry is made"
            )
    refuse_fsdp1(parameters.values())
    if any_sharded(parameters.values()):
        check_fsdp(model, parameters)
    for name, parameter in parameters.items():
        if parameter.is_complex():
            raise ValueError(f"model: parameter {name!r} is complex, which a metric does not support")


def check_pieces(model: nn.Module) -> None:
    """Refuse to compute a batch in pieces where norms take the statistics of their batch, in eval mode too."""
    for name in _without_statistics(model, _BatchNorm):
        raise ValueError(
            f"micro_batch: {name!r} has no running statistics, so that its outputs depend on the whole batch; "
            "let it track them, or leave micro_batch out"
        )


def check_ranks(model: nn.Module) -> None:
    """Likewise to compute the batches of several ranks each for itself."""
    for name in _without_statistics(model, nn.SyncBatchNorm):
        raise ValueError(
            f"model: {name!r} is a SyncBatchNorm without running statistics, which in a refresh would take "
            "those of each rank's own batch; let it track them"
        )


def _without_statistics(model: nn.Module, kind: type[_BatchNorm]) -> list[str]:
    return [name for name, own in model.named_modules() if isinstance(own, kind) and own.running_mean is None]


def check_capture(metric: Metric, solver: str, parameters: Mapping[str, Tensor]) -> None:
    """Refuse what cannot be replayed as CUDA graphs."""
    if metric.whole is not metric:
        raise ValueError("capture: not with shards, because the ranks exchange vectors in every inner step")
    if not SOLVERS[solver].capturable:
        raise ValueError(f"capture: not with solver={solver!r}, whose steps are not all the same")
    if not all(parameter.is_cuda for parameter in parameters.values()):
        raise ValueError("capture: CUDA graphs need every parameter on a CUDA device")

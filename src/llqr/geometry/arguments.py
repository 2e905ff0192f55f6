"""Whether what a geometry is made of fits together: each check says in one sentence what does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from llqr.geometry.runtime import Runtime
from llqr.metric import Metric
from llqr.solvers import SOLVERS, Inner


def check_types(inner: Any, runtime: Any, on_refresh: Any) -> None:
    for name, given, kind in (("inner", inner, Inner), ("runtime", runtime, Runtime)):
        if not (given is None or isinstance(given, kind)):
            raise TypeError(f"{name}: expected a llqr.{kind.__name__}, got {given!r}")
    if on_refresh is not None and not callable(on_refresh):
        raise TypeError(f"on_refresh: expected a function of a report, got {type(on_refresh).__name__}")


def check_capture(metric: Metric, solver: str, parameters: Mapping[str, Tensor]) -> None:
    """Refuse what cannot be replayed as CUDA graphs."""
    if metric.whole is not metric:
        raise ValueError("capture: not with shards, because the ranks exchange vectors in every inner step")
    if not SOLVERS[solver].capturable:
        raise ValueError(f"capture: not with solver={solver!r}, whose steps are not all the same")
    if not all(parameter.is_cuda for parameter in parameters.values()):
        raise ValueError("capture: CUDA graphs need every parameter on a CUDA device")

"""The laboratory: data, models and commands that run the library's methods on real problems.

`Experiment` and `compare` are for your own model and data; they are imported when they are asked for, because the
command line needs none of them for its help.
"""

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llqr.lab.own.comparison import Comparison, compare
    from llqr.lab.own.experiment import Experiment

__all__ = ["Comparison", "Experiment", "compare"]

_MODULES = {"Comparison": "comparison", "Experiment": "experiment", "compare": "comparison"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return resolve_name(f"llqr.lab.own.{_MODULES[name]}:{name}")

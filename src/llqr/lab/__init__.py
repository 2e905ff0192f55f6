"""The laboratory: data, models and commands that run the library's methods on real problems.

`Experiment` and `compare` are for a comparison of one's own; they are imported when they are asked for, because the
command line needs neither for its help.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llqr.lab.own.comparison import Comparison, compare
    from llqr.lab.own.experiment import Experiment
    from llqr.lab.own.image_folder import image_folder

__all__ = ["Comparison", "Experiment", "compare", "image_folder"]

_MODULES = {
    "Comparison": "comparison",
    "Experiment": "experiment",
    "compare": "comparison",
    "image_folder": "image_folder",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"llqr.lab.own.{_MODULES[name]}"), name)

"""The laboratory: data, models and commands that run the library's methods on real problems.

`Experiment` and `compare` are for a comparison of one's own; they are imported when they are asked for, because the
command line needs neither for its help.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llqr.lab.own.comparison import Comparison, compare
    from llqr.lab.tasks.own.experiment import Experiment
    from llqr.lab.tasks.own.image_folder import image_folder

__all__ = ["Comparison", "Experiment", "compare", "image_folder"]

_MODULES = {
    "Comparison": "own.comparison",
    "Experiment": "tasks.own.experiment",
    "compare": "own.comparison",
    "image_folder": "tasks.own.image_folder",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"llqr.lab.{_MODULES[name]}"), name)

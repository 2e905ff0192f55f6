"""Warnings that point at the caller's own line, from however deep in the library and in torch they come."""

import sys
import warnings
from types import FrameType

INSIDE = ("llqr", "torch", "contextlib")
#: Nobody calls the command but the shell, so that there is no line outside to point at; it shows none of its own.
COMMAND = "llqr.lab.cli"


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    frame: FrameType | None = sys._getframe()
    stacklevel = 1
    while frame is not None and _inside(frame.f_globals.get("__name__", "")):
        frame, stacklevel = frame.f_back, stacklevel + 1
    warnings.warn(message, category, stacklevel)


def _inside(module: str) -> bool:
    return module.partition(".")[0] in INSIDE and not f"{module}.".startswith(f"{COMMAND}.")

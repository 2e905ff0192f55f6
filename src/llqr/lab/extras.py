"""Packages that only some commands need, imported when they are used."""

from importlib import import_module
from typing import Any


def extra(module: str, purpose: str) -> Any:
    """A module of a package that the extra ``lab`` brings; ``purpose`` says what needs which package."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ModuleNotFoundError(
            f"{purpose}, which is not installed; install it with: pip install '.[lab]' in a clone."
        ) from error

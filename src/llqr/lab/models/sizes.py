"""The sizes that a network is made of, checked before it is: torch takes some of zero, and divides by others."""

from collections.abc import Sequence
from numbers import Integral


def check_sizes(**sizes: int) -> None:
    """Refuse what is not a positive integer, by the name of its argument; a recipe may hold anything."""
    for name, size in sizes.items():
        if not _is_integer(size):
            raise ValueError(f"{name} must be an integer, got {size!r}.")
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}.")


def check_hidden(hidden: Sequence[int]) -> None:
    """The same for the widths of hidden layers, of which there may be none."""
    if not isinstance(hidden, list | tuple) or not all(_is_integer(width) and width > 0 for width in hidden):
        raise ValueError(f"hidden must hold positive widths, got {hidden!r}.")


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)

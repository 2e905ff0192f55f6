"""Checks that build a network or a geometry and take long: what was accepted once is not checked again."""

from collections.abc import Callable

_accepted: set[str] = set()


def unless_accepted(settings: object, check: Callable[[], object]) -> None:
    """Make a check that raises if it refuses ``settings``, which its `repr` shows in full."""
    key = repr(settings)
    if key not in _accepted:
        check()
        _accepted.add(key)

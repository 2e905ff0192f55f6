"""Settings that may be a number or a function of the optimizer step."""

from collections.abc import Callable
from math import inf, isfinite
from typing import Any

Schedule = float | Callable[[int], float]


def at(schedule: Schedule, step: int, argument: str, lower: float, upper: float = inf) -> float:
    """The value of a setting at a step; a function of the step may not give infinity, NaN, or leave the range."""
    given = schedule(step) if callable(schedule) else schedule
    try:
        value = float(given)
    except (TypeError, ValueError):
        raise TypeError(f"{argument}: expected a number, got {given!r} at step {step}") from None
    if not isfinite(value):
        raise ValueError(f"{argument}: expected a finite number, got {value} at step {step}")
    if not lower <= value <= upper:
        raise ValueError(f"{argument}: expected a number in {_range(lower, upper)}, got {value} at step {step}")
    return value


def check(argument: str, schedule: Schedule, lower: float, upper: float = inf) -> None:
    """Refuse a fixed value outside `[lower, upper]` or infinite; functions of the step are checked at each step."""
    if not callable(schedule):
        check_number(argument, schedule, lower, upper, " or a function of the step")


def check_number(argument: str, given: Any, lower: float, upper: float = inf, alternative: str = "") -> float:
    """A number as Python's own; refuses what is not a finite one in `[lower, upper]`."""
    number = plain(given)
    if number is None or not lower <= number <= upper:
        raise ValueError(f"{argument}: expected a number in {_range(lower, upper)}{alternative}, got {given!r}")
    return number


def plain(number: Any) -> float | None:
    """A finite number as Python's own, if it is one: also a scalar of numpy, or a tensor without dimensions."""
    if getattr(number, "ndim", None) == 0:
        number = number.item()
    return number if isinstance(number, int | float) and not isinstance(number, bool) and isfinite(number) else None


def _range(lower: float, upper: float) -> str:
    return f"[{lower:g}, {upper:g}{']' if isfinite(upper) else ')'}"

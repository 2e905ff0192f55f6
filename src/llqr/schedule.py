"""Settings that may be a number or a function of the optimizer step."""

from collections.abc import Callable
from math import inf, isfinite
from typing import Any

Schedule = float | Callable[[int], float]


def at(schedule: Schedule, step: int, argument: str, lower: float, upper: float = inf) -> float:
    """The value of a setting at a step; a function of the step must stay in the range too."""
    given = schedule(step) if callable(schedule) else schedule
    return float(check_number(argument, given, lower, upper, where=f" at step {step}"))


def check(argument: str, schedule: Schedule, lower: float, upper: float = inf) -> None:
    """Refuse a fixed value outside `[lower, upper]` or infinite; functions of the step are checked at each step."""
    if not callable(schedule):
        check_number(argument, schedule, lower, upper, alternative=" or a function of the step")


def check_number(
    argument: str, given: Any, lower: float, upper: float = inf, *, alternative: str = "", where: str = ""
) -> float:
    """A number as Python's own; refuses what is not a finite one in `[lower, upper]`."""
    number = plain(given)
    if number is None or not lower <= number <= upper:
        range_ = f"[{lower:g}, {upper:g}{']' if isfinite(upper) else ')'}"
        raise ValueError(f"{argument}: expected a number in {range_}{alternative}, got {given!r}{where}")
    return number


def plain(number: Any) -> float | None:
    """A finite number as Python's own, if it is one: also a scalar of numpy, or a tensor without dimensions."""
    if getattr(number, "ndim", None) == 0:
        number = number.item()
    return number if isinstance(number, int | float) and not isinstance(number, bool) and isfinite(number) else None

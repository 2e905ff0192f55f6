"""Settings that may be a number or a function of the optimizer step."""

from __future__ import annotations

from collections.abc import Callable

Schedule = float | Callable[[int], float]


def at(schedule: Schedule, step: int) -> float:
    """The value of a setting at a step."""
    return float(schedule(step)) if callable(schedule) else float(schedule)


def check(argument: str, schedule: Schedule, lower: float, upper: float = float("inf")) -> None:
    """Refuse a fixed value outside `[lower, upper]`; functions of the step are not checked."""
    if callable(schedule):
        return
    if isinstance(schedule, bool) or not isinstance(schedule, int | float) or not lower <= schedule <= upper:
        raise ValueError(
            f"{argument}: expected a number in [{lower:g}, {upper:g}] or a function of the step, got {schedule!r}"
        )

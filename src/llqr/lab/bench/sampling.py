"""Repeated measurements: medians and quartiles, and actions that take turns so that load on the machine affects all."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llqr.lab.bench.clock import Clock

WARM_UP = 3
"""Untimed runs at first: kernels are chosen, memory is allocated, optimizers create their state."""


def quartiles(values: Sequence[float] | NDArray[np.float64]) -> dict[str, float]:
    """The median of repeats, the quartiles around it, and how many repeats there were."""
    low, median, high = (float(quantile) for quantile in np.quantile(values, (0.25, 0.5, 0.75)))
    return {"median": median, "low": low, "high": high, "n": len(values)}


def ratio(times: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """Of two actions that took turns: time of the first / time of the second, round by round."""
    return quartiles(np.divide(times, others))


@dataclass(frozen=True)
class Action:
    """Something to be timed ``repeats`` times, each time as the mean over consecutive runs of ``burst`` seconds in all.

    In training the host launches a step while the device is still busy with the one before. A burst of many runs
    includes that overlap; a single run would measure the time of the host.
    """

    run: Callable[[], object]
    repeats: int
    burst: float = 0.0
    warm_up: int = WARM_UP


def interleaved(actions: Mapping[str, Action], clock: Clock) -> dict[str, list[float]]:
    """Seconds of every action. They take turns, every other round in the opposite order.

    An action with fewer repeats than another skips rounds, spread evenly over all of them.
    """
    runs = {}
    for name, action in actions.items():
        for _ in range(action.warm_up):
            action.run()
        runs[name] = max(1, math.ceil(action.burst / clock.seconds(action.run, 1))) if action.burst else 1
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    rounds = max(action.repeats for action in actions.values())
    for turn in range(rounds):
        order = list(actions.items())
        for name, action in order if turn % 2 == 0 else reversed(order):
            if (turn + 1) * action.repeats // rounds > turn * action.repeats // rounds:
                seconds[name].append(clock.seconds(action.run, runs[name]))
    return seconds

"""Time a device: CUDA events on a GPU, where the host runs ahead of the work; on a CPU the wall clock, or another."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

BURST = 0.1
"""Seconds of consecutive steps that are timed together."""
WARM_UP = 3
"""Untimed runs at first: kernels are chosen, memory is allocated, optimizers create their state."""


class Clock:
    """Measures the seconds that an action takes on a device."""

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        self.device, self._now = device, now

    def seconds(self, action: Callable[[], object], times: int = 1) -> float:
        """Seconds of an action on a device that is idle at first, averaged over this many consecutive runs."""
        if self.device.type != "cuda":
            before = self._now()
            for _ in range(times):
                action()
            return (self._now() - before) / times
        torch.cuda.synchronize(self.device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(torch.cuda.current_stream(self.device))
        for _ in range(times):
            action()
        end.record(torch.cuda.current_stream(self.device))
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / times


def quartiles(values: Sequence[float] | NDArray[np.float64]) -> dict[str, float]:
    """The median of repeats, the quartiles around it, and the number of repeats."""
    low, median, high = (float(quantile) for quantile in np.quantile(values, (0.25, 0.5, 0.75)))
    return {"median": median, "low": low, "high": high, "n": len(values)}


def ratio(times: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """Time of one action / time of another, round by round."""
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
    """Seconds of every action. Actions take turns, every other round in the opposite order, and so share any load.

    An action with fewer repeats than another skips rounds, spread evenly over all of them.
    """
    runs = {}
    for name, action in actions.items():
        for _ in range(action.warm_up):
            action.run()
        runs[name] = max(1, math.ceil(action.burst / clock.seconds(action.run))) if action.burst else 1
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    rounds = max(action.repeats for action in actions.values())
    for turn in range(rounds):
        order = list(actions.items())
        for name, action in order if turn % 2 == 0 else reversed(order):
            if (turn + 1) * action.repeats // rounds > turn * action.repeats // rounds:
                seconds[name].append(clock.seconds(action.run, runs[name]))
    return seconds

"""The time of a device: CUDA events on a GPU, where the host runs ahead of the work, and the wall clock on a CPU.

Repeats become medians and quartiles, and actions take turns so that load on the machine affects all of them.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

Result = TypeVar("Result")
Mark = torch.cuda.Event | float
WARM_UP = 3
"""Untimed runs at first: kernels are chosen, memory is allocated, optimizers create their state."""


class Clock:
    """Marks points in the work of a device and measures the time between them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait(self) -> None:
        """Until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def mark(self) -> Mark:
        """The time at which all work launched so far is done; does not wait for it."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def between(self, start: Mark, end: Mark) -> float:
        """Seconds from one mark to a later one."""
        if isinstance(start, float) or isinstance(end, float):
            assert isinstance(start, float) and isinstance(end, float)  # noqa: PT018
            return end - start
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def timed(self, action: Callable[[], Result]) -> tuple[Result, float]:
        """What an action returns, and the seconds it takes on a device that is idle at first."""
        self.wait()
        start = self.mark()
        result = action()
        return result, self.between(start, self.mark())

    def seconds(self, action: Callable[[], object], times: int = 1) -> float:
        """Seconds an action takes, averaged over this many consecutive runs."""

        def repeated() -> None:  # which lets go of every result before the next run
            for _ in range(times):
                action()

        return self.timed(repeated)[1] / times


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
        runs[name] = max(1, math.ceil(action.burst / clock.seconds(action.run))) if action.burst else 1
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    rounds = max(action.repeats for action in actions.values())
    for turn in range(rounds):
        order = list(actions.items())
        for name, action in order if turn % 2 == 0 else reversed(order):
            if (turn + 1) * action.repeats // rounds > turn * action.repeats // rounds:
                seconds[name].append(clock.seconds(action.run, runs[name]))
    return seconds

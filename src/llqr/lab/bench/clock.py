"""The time of a device: CUDA events on a GPU, where the host runs ahead of the work, and the wall clock on a CPU."""

import time
from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")
Mark = torch.cuda.Event | float


class Clock:
    """Marks moments in the work of a device, and says how far apart they were."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def settle(self) -> None:
        """Wait until nothing is left to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def mark(self) -> Mark:
        """The moment at which all that was asked of the device so far is done; does not wait for it."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def between(self, start: Mark, end: Mark) -> float:
        """Seconds from one mark to a later one."""
        if isinstance(start, float):
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def timed(self, action: Callable[[], Result]) -> tuple[Result, float]:
        """What an action returns, and the seconds it takes."""
        self.settle()
        start = self.mark()
        result = action()
        return result, self.between(start, self.mark())

    def seconds(self, action: Callable[[], object], times: int = 1) -> float:
        """Seconds an action takes, as the mean over so many in a row, begun with an idle device."""
        self.settle()
        start = self.mark()
        for _ in range(times):
            action()
        return self.between(start, self.mark()) / times

"""The time of a device: CUDA events on a GPU, where the host runs ahead of the work, and the wall clock on a CPU."""

import time
from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")
Mark = torch.cuda.Event | float


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
        """What an action returns, and the seconds it takes."""
        self.wait()
        start = self.mark()
        result = action()
        return result, self.between(start, self.mark())

    def seconds(self, action: Callable[[], object], times: int = 1) -> float:
        """Seconds an action takes, averaged over this many consecutive runs that start on an idle device."""
        self.wait()
        start = self.mark()
        for _ in range(times):
            action()
        return self.between(start, self.mark()) / times

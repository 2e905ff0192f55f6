"""What happens between two evaluations."""

import math
from typing import Any

import torch


class Interval:
    """Sums over the steps since the last evaluation; the loss stays on the device until it is read."""

    def __init__(self, device: torch.device, first: int = 0) -> None:
        self.first = first  # the number of steps done before
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.mean_loss = math.nan
        self.count = 0
        self.seconds = 0.0
        self.refreshes: list[dict[str, Any]] = []

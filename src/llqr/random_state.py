"""torch's random number generators at one moment, so that several passes draw the same numbers."""

from __future__ import annotations

import torch


def vary(device: torch.device, by: int) -> None:
    """Make the next random numbers depend on `by`, because every refresh starts from the same random state."""
    seed = int(torch.randint(2**62, (), device="cpu")) + by
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)

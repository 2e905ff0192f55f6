"""What torch keeps of weights while a context of the caller is entered, and would use again after they have moved."""

from __future__ import annotations

import torch
from torch.nn.utils import parametrize


def forget_derived_weights() -> None:
    """Copies in low precision, under `autocast`, and what parametrizations have computed, under `cached`."""
    torch.clear_autocast_cache()
    parametrize._cache.clear()

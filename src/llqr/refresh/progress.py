"""A refresh under way: which optimizer steps it spans, and how much of it is done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from llqr.curvature.batch import Batch, tensors_of
from llqr.refresh.inner_loop import Loop


@dataclass
class Progress:
    """A refresh that began at `step` and has to end before `until`, when the next one begins.

    Attributes:
        batch: what it learns from; a copy if it is spread, because a training loop may reuse its batch's memory.
        loop: None until the first product, and again after loading: the steps done before are then repeated, which
            needs no solver state in the checkpoint and gives the same factors.
        seconds: spent so far.
    """

    step: int
    until: int
    batch: Batch
    loop: Loop | None = None
    seconds: float = 0.0

    def up_to_date(self, step: int) -> bool:
        """Whether the inner steps owed before this optimizer step are done: each step owes an even share of all."""
        if self.loop is None:
            return False
        total = len(self.loop.plan)
        shares, period = step - self.step + 1, self.until - self.step
        return self.loop.done >= min(total, total * shares // period)

    def state(self) -> dict[str, Any]:
        """For every tensor of the batch it says whether it follows the model's device, or stays on the CPU."""
        follows = [tensor.device.type != "cpu" for tensor in tensors_of(self.batch)]
        return {"step": self.step, "until": self.until, "batch": self.batch, "follows_model": follows}

    @classmethod
    def of(cls, state: Mapping[str, Any], device: torch.device) -> Progress:
        follows = iter(state["follows_model"])
        batch = pytree.tree_map_only(
            Tensor, lambda tensor: tensor.to(device) if next(follows) else tensor, state["batch"]
        )
        return cls(int(state["step"]), int(state["until"]), batch)

    def __getstate__(self) -> dict[str, Any]:
        """Without the loop, whose graphs cannot be copied."""
        return self.__dict__ | {"loop": None}

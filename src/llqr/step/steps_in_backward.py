"""Other optimizers that step inside a backward pass, by hooks: in a step of two passes they would do so twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


@contextmanager
def refuse_steps_in_backward() -> Iterator[None]:
    """While entered, no optimizer may step inside a backward pass. What a closure does by itself is its own affair."""

    def refuse(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> None:
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"closure: a hook of its backward pass steps another optimizer ({type(optimizer).__name__}), which the "
                "two passes of a probe would do twice; remove the hook, and call that step() after this one"
            )

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()

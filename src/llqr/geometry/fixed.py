"""A metric that is given, not learned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from llqr.refresh.report import Refresh


class FixedGeometry:
    """A metric that is given, not learned: pairs of a parameter and a function `gradient -> U gradient`.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> geometry = FixedGeometry([(weight, lambda g: 3 * g)])
        >>> geometry.transport([weight], [torch.ones(2)])[0].tolist()
        [3.0, 3.0]
    """

    due = False
    model = None
    batches = None
    shards = 1

    def __init__(self, metric: Iterable[tuple[Tensor, Callable[[Tensor], Tensor]]]) -> None:
        self._apply = dict(metric)

    def refresh(self, batch: Any) -> Refresh:
        raise RuntimeError("refresh: a fixed geometry is given, not learned")

    def refresh_if_due(self, batch: Any) -> None:
        pass

    def advance(self) -> None:
        pass

    def claim(self, parameters: Iterable[Tensor]) -> None:
        pass

    def transport(self, parameters: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
        return [self._apply[p](g) if p in self._apply else g for p, g in zip(parameters, grads, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            raise ValueError("state_dict: a fixed geometry holds no state, but the saved one does")

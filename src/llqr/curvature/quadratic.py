"""The quadratic model that a refresh learns from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

Named = dict[str, Tensor]


@dataclass(frozen=True)
class QuadraticModel:
    """`loss + g.delta + 1/2 delta.H delta` at the current weights, on one batch.

    Attributes:
        loss: the mean loss.
        gradient: `g`, by parameter name.
        product: `v -> H v`, for vectors by parameter name.
        terms: how many terms the mean loss averages; the weight of a rank beside others.

    Example (`H = 2 I`):
        >>> import torch
        >>> model = QuadraticModel(torch.tensor(1.0), {"w": torch.ones(2)}, lambda v: {"w": 2 * v["w"]})
        >>> model.product(model.gradient)["w"].tolist()
        [2.0, 2.0]
    """

    loss: Tensor
    gradient: Named
    product: Callable[[Mapping[str, Tensor]], Named]
    terms: Tensor | None = None

"""The quadratic model that a refresh learns from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Named = dict[str, Tensor]


@dataclass(frozen=True)
class QuadraticModel:
    """`loss + g.delta + 1/2 delta.H delta` at the current weights, on one batch.

    Attributes:
        loss: the mean loss.
        gradient: `g`, by parameter name.
        product: `v -> H v`, for vectors by parameter name.
        gradients: `g_1 ... g_K`, the gradients of equal shares of the batch, whose mean is `g`; empty for `K = 1`.
        terms: how many terms the mean loss averages; what a rank counts by beside others.
        products: `product` for several vectors at once, each name's stacked along a new first dimension; None if they
            have to be multiplied one after another.

    Example (`H = 2 I`):
        >>> import torch
        >>> model = QuadraticModel(torch.tensor(1.0), {"w": torch.ones(2)}, lambda v: {"w": 2 * v["w"]})
        >>> model.product(model.gradient)["w"].tolist()
        [2.0, 2.0]
    """

    loss: Tensor
    gradient: Named
    product: Callable[[Mapping[str, Tensor]], Named]
    gradients: tuple[Named, ...] = ()
    terms: Tensor | None = None
    products: Callable[[Mapping[str, Tensor]], Named] | None = None

    def multiplied(self, vectors: Sequence[Mapping[str, Tensor]]) -> list[Named]:
        """`H v` for each of the vectors."""
        if self.products is None or len(vectors) == 1:
            return [self.product(v) for v in vectors]
        Hv = self.products({name: torch.stack([v[name] for v in vectors]) for name in vectors[0]})
        return [{name: part[k] for name, part in Hv.items()} for k in range(len(vectors))]

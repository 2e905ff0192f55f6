"""The exact second-order step in one call."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from llqr.lqr.cost_blocks import CurvatureScale, DivergenceName, costs
from llqr.lqr.linearisation import DEFAULT_MAX_DIMENSION, LossFunction, linearise
from llqr.lqr.riccati import solve


def exact_step(
    model: nn.Sequential | Iterable[nn.Module],
    loss_fn: LossFunction,
    batch: tuple[Tensor, Tensor],
    *,
    divergence: DivergenceName,
    damping: float,
    curvature_scale: CurvatureScale | None = None,
    max_dimension: int = DEFAULT_MAX_DIMENSION,
) -> dict[str, Tensor]:
    """δθ = -(H + damping I)^-1 ∇L per parameter, by `linearise`, `costs` and `solve`; the weights stay as they are.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double().eval()
    >>> x, y = torch.randn(5, 3).double(), torch.tensor([0, 1, 0, 1, 1])
    >>> step = exact_step(model, nn.functional.cross_entropy, (x, y), divergence="ngd", damping=0.1)
    >>> {name: tuple(delta.shape) for name, delta in step.items()}
    {'0.weight': (4, 3), '0.bias': (4,), '2.weight': (2, 4), '2.bias': (2,)}
    """
    linearisation = linearise(model, loss_fn, batch, max_dimension=max_dimension)
    return solve(costs(linearisation, divergence, damping=damping, curvature_scale=curvature_scale))

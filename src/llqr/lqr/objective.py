"""The relaxed LQR objective at a given δθ, or at δθ = -U g, by a rollout of the linearised dynamics."""

from collections.abc import Callable, Mapping

from torch import Tensor

from llqr.lqr.cost_blocks import LayerwiseLQR
from llqr.lqr.riccati import rollout


def relaxed_objective(lqr: LayerwiseLQR, delta: Mapping[str, Tensor]) -> Tensor:
    """J(δθ) = ∇ℓ.δx_N + ½ δx_N^T Q_N δx_N + Σ_i [½ δx_i^T Q_i δx_i + ½ δθ_i^T R_i δθ_i + δθ_i^T M_i δx_i].

    `delta` maps every trainable parameter's name to a tensor of its shape; J is differentiable in it. It equals
    g.δθ + ½ δθ^T H δθ + ½ damping |δθ|².

    >>> import torch
    >>> from torch import nn
    >>> from llqr.lqr import costs, linearise
    >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double().eval()
    >>> x, y = torch.randn(5, 3).double(), torch.randn(5, 2).double()
    >>> lqr = costs(linearise(model, nn.functional.mse_loss, (x, y)), "gauss-newton")
    >>> float(relaxed_objective(lqr, {name: torch.zeros_like(g) for name, g in lqr.gradient.items()}))
    0.0
    """
    _check_delta(lqr, delta)
    packed = [block.stage.pack(delta) for block in lqr.stages]
    states, controls = rollout(lqr, lambda index, _: packed[index])
    final = states[-1]
    total = lqr.output_gradient @ final + final @ lqr.Q_N @ final / 2
    for block, dx, dtheta in zip(lqr.stages, states, controls, strict=False):  # the cost of δx_N is counted above
        total = total + dx @ block.Q @ dx / 2 + dtheta @ block.R @ dtheta / 2 + dtheta @ block.M @ dx
    return total


def metric_objective(lqr: LayerwiseLQR, apply: Callable[[dict[str, Tensor]], Mapping[str, Tensor]]) -> Tensor:
    """J(U): the relaxed objective at δθ = -U g, where `apply(gradients)` returns U g under the same names.

    >>> import torch
    >>> from torch import nn
    >>> from llqr.lqr import costs, linearise
    >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double().eval()
    >>> x, y = torch.randn(5, 3).double(), torch.randn(5, 2).double()
    >>> lqr = costs(linearise(model, nn.functional.mse_loss, (x, y)), "gauss-newton")
    >>> short = metric_objective(lqr, lambda g: {name: 1e-3 * value for name, value in g.items()})
    >>> bool(short < 0)
    True
    """
    Ug = apply(dict(lqr.gradient))
    return relaxed_objective(lqr, {name: -value for name, value in Ug.items()})


def _check_delta(lqr: LayerwiseLQR, delta: Mapping[str, Tensor]) -> None:
    missing, unknown = lqr.gradient.keys() - delta.keys(), delta.keys() - lqr.gradient.keys()
    if missing or unknown:
        raise ValueError(
            f"`delta` must name every trainable parameter once; missing {sorted(missing)}, unknown {sorted(unknown)}."
        )
    for name, g in lqr.gradient.items():
        if delta[name].shape != g.shape or delta[name].dtype != g.dtype:
            raise ValueError(
                f"`delta[{name!r}]` must be {g.dtype} of shape {tuple(g.shape)}, got {delta[name].dtype} of shape "
                f"{tuple(delta[name].shape)}."
            )

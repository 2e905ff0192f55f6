"""The quadratic costs Q_i, R_i, M_i and Q_N that make the LQR's total cost equal to δθ^T H δθ for a chosen H."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.func import grad, jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel

from llqr.lqr.linearisation import Linearisation, LinearStage
from llqr.lqr.stages import Stage

DivergenceName = Literal["newton", "gauss-newton", "ngd"]
CurvatureScale = Literal["sum", "mean"] | float


@dataclass(frozen=True)
class StageBlocks:
    """What the recursion needs from one stage: dynamics A_i, B_i and costs Q_i, R_i (damped), M_i.

    The cost is ½ δx^T Q δx + ½ δθ^T R δθ + δθ^T M δx, so M_i has one row per parameter.
    """

    stage: Stage
    A: Tensor
    B: Tensor
    Q: Tensor
    R: Tensor
    M: Tensor


@dataclass(frozen=True)
class LayerwiseLQR:
    """The LQR problem at the current weights; its minimiser over δθ is the step -(H + damping I)^-1 g."""

    stages: tuple[StageBlocks, ...]
    Q_N: Tensor
    output_gradient: Tensor
    """∇_{x_N} ℓ, the only linear term; the dynamics carry it to θ."""
    gradient: dict[str, Tensor]
    divergence: DivergenceName
    damping: float


def costs(
    linearisation: Linearisation,
    divergence: DivergenceName,
    *,
    damping: float = 0.0,
    curvature_scale: CurvatureScale | None = None,
) -> LayerwiseLQR:
    """The cost blocks of a divergence.

    - "newton": H is the Hessian of the loss. Q_N = ∇²ℓ, and the block of stage i is the second derivative of
      λ_{i+1} . f_i(x_i, θ_i): the contribution of the stage's own curvature.
    - "gauss-newton": Q_N = ∇²ℓ and no stage costs, H = J^T ∇²ℓ J.
    - "ngd": Q_N is the Fisher matrix of the softmax, diag p_n - p_n p_n^T for each sample, no stage costs. Outputs are
      the (batch, classes) scores of a softmax; for any other loss choose "gauss-newton" (a warning says so).
      `curvature_scale` is "sum" over the batch (the default, although the loss is a mean), "mean", or a number that
      multiplies the sum.

    `damping` is added to the diagonal of every R_i.

    >>> from torch import nn
    >>> from llqr.lqr import linearise
    >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double().eval()
    >>> x, y = torch.randn(5, 3).double(), torch.tensor([0, 1, 0, 1, 1])
    >>> lqr = costs(linearise(model, nn.functional.cross_entropy, (x, y)), "newton", damping=0.1)
    >>> [tuple(block.M.shape) for block in lqr.stages], tuple(lqr.Q_N.shape)
    ([(16, 15), (0, 20), (10, 20)], (10, 10))
    """
    if divergence not in get_args(DivergenceName):
        raise ValueError(f"`divergence` must be one of {', '.join(get_args(DivergenceName))}, got {divergence!r}.")
    if not isfinite(damping) or damping < 0:
        raise ValueError(f"`damping` must be a finite number >= 0, got {damping}.")
    if curvature_scale is not None and divergence != "ngd":
        raise ValueError(f"`curvature_scale` applies to 'ngd' only; {divergence!r} has the scale of the loss.")

    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # attention that can be differentiated twice
        if divergence == "ngd":
            _warn_of_other_loss(linearisation)
            Q_N = _softmax_fisher(linearisation.outputs, "sum" if curvature_scale is None else curvature_scale)
        else:
            Q_N = _hessian(linearisation.loss_of_state, linearisation.outputs.reshape(-1))
        blocks = tuple(_blocks(linear, divergence == "newton", damping) for linear in linearisation.stages)
    return LayerwiseLQR(blocks, Q_N, linearisation.output_gradient, linearisation.gradient, divergence, float(damping))


def _blocks(linear: LinearStage, curved: bool, damping: float) -> StageBlocks:
    """The stage's own curvature is ∇²_z (λ_{i+1} . f_i(z)) at z = (x_i, θ_i): the matrix [[Q_i, M_i^T], [M_i, R_i]]."""
    stage, costate, n = linear.stage, linear.costate, linear.stage.state_dim
    if curved and stage.point.numel() and costate.numel():
        joint = _hessian(lambda z: costate @ stage(z).reshape(-1), stage.point)
    else:
        joint = stage.point.new_zeros((stage.point.numel(),) * 2)
    damped = joint[n:, n:] + damping * torch.eye(stage.parameter_dim, dtype=joint.dtype, device=joint.device)
    return StageBlocks(stage, linear.A, linear.B, Q=joint[:n, :n], R=damped, M=joint[n:, :n])


def _warn_of_other_loss(linearisation: Linearisation) -> None:
    """A loss of softmax scores, or of their log-probabilities, is the same for both of them."""
    scores = linearisation.outputs
    if scores.ndim != 2:
        return
    try:
        again = linearisation.loss_of_state(scores.log_softmax(dim=1).reshape(-1))
    except RuntimeError:  # the loss refuses them, as a binary cross-entropy of probabilities does
        again = torch.full_like(linearisation.loss, torch.nan)
    rounding = 1e3 * torch.finfo(scores.dtype).eps * (1 + linearisation.loss.abs() + scores.abs().max())
    if not bool((again - linearisation.loss).abs() <= rounding):
        warnings.warn(
            "`divergence` 'ngd' is the Fisher matrix of a softmax, but `loss_fn` does not take the outputs as its "
            "scores; take 'gauss-newton'.",
            stacklevel=3,
        )


def _softmax_fisher(outputs: Tensor, scale: CurvatureScale) -> Tensor:
    if outputs.ndim != 2:
        raise ValueError(
            f"`divergence` 'ngd' needs outputs of shape (batch, classes), got {tuple(outputs.shape)}; let the last "
            "stage of the model reshape them."
        )
    if scale == "sum":
        weight = 1.0
    elif scale == "mean":
        weight = 1.0 / len(outputs)
    elif isinstance(scale, int | float) and isfinite(scale) and scale > 0:
        weight = float(scale)
    else:
        raise ValueError(f"`curvature_scale` must be 'sum', 'mean' or a positive number, got {scale!r}.")
    p = outputs.softmax(dim=1)
    fisher: Tensor = torch.block_diag(*(torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)))
    return weight * fisher


def _hessian(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """∇² of a scalar function, reverse mode over reverse mode.

    Not torch.func.hessian, which differentiates jacrev: through layer_norm, and batch_norm over batch statistics, that
    returns wrong numbers (torch 2.11 and 2.13), while jacrev of grad is right.
    """
    matrix: Tensor = jacrev(grad(function))(at)
    return (matrix + matrix.mT) / 2

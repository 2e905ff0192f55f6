"""What the quadratic model measures: natural gradient / Gauss-Newton, Newton, or a divergence of one's own."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from llqr.schedule import plain

#: `u -> Q u`, the Hessian in the outputs.
OutputHessian = Callable[[Tensor], Tensor]
Scale = str | float


def check_scale(scale: Scale | None) -> None:
    if scale is None or scale in ("sum", "mean"):
        return
    if not (plain(scale) or 0) > 0:
        raise ValueError(f"curvature_scale: expected 'sum', 'mean' or a positive number, got {scale!r}")


@dataclass(frozen=True)
class Divergence:
    """`H = scale * (J^T Q J [+ second derivatives of the network])`, with `Q` the loss's own Hessian in the outputs.

    For softmax cross-entropy `Q` of the mean loss is `(diag p - p p^T) / N` row by row, whatever the label smoothing;
    ignored rows have none. `scale="sum"` multiplies by the number of terms `N`, as in the authors' natural gradient.

    Attributes:
        name: what tables and logs call it.
        ema: the moving average's default `beta`.
        scale: the default `curvature_scale`.
        second_order: whether the second derivatives of the network belong to `H` (Newton).

    Example (natural gradient with the curvature of the mean loss):
        >>> Divergence("ngd-mean", ema=0.95, scale="mean")
        Divergence(name='ngd-mean', ema=0.95, scale='mean', second_order=False)
    """

    name: str
    ema: float
    scale: Scale
    second_order: bool = False

    def output_hessian(self, loss: Callable[[Tensor], Tensor], outputs: Tensor) -> OutputHessian:
        """`u -> Q u` at these outputs, linearised once."""
        return _hessian(loss, outputs)


@dataclass(frozen=True)
class OutputDivergence(Divergence):
    """A divergence `D(z, z0)` between two sets of outputs, as a mean over the batch; `Q` is its Hessian at `z = z0`.

    Example (Renyi of order alpha between softmax distributions; its Hessian is `alpha` times Fisher's):
        >>> def renyi(z, z0, alpha=0.5):
        ...     p, q = z.log_softmax(-1), z0.log_softmax(-1)
        ...     return torch.logsumexp(alpha * q + (1 - alpha) * p, -1).mean() / (alpha - 1)
        >>> OutputDivergence("renyi-0.5", ema=0.95, scale="sum", between=renyi).name
        'renyi-0.5'
    """

    between: Callable[[Tensor, Tensor], Tensor] | None = None

    def output_hessian(self, loss: Callable[[Tensor], Tensor], outputs: Tensor) -> OutputHessian:
        between = self.between
        if between is None:
            raise ValueError("between: a divergence of outputs needs the function D(z, z0)")
        return _hessian(lambda z: between(z, outputs.detach()), outputs)


def _hessian(function: Callable[[Tensor], Tensor], outputs: Tensor) -> OutputHessian:
    with torch.enable_grad():
        z = outputs.detach().requires_grad_()
        (slope,) = torch.autograd.grad(function(z), z, create_graph=True, materialize_grads=True)

    def product(u: Tensor) -> Tensor:
        if not slope.requires_grad:  # a loss linear in the outputs
            return torch.zeros_like(u)
        (q,) = torch.autograd.grad(slope, z, u, retain_graph=True, materialize_grads=True)
        return q

    return product


NGD = Divergence("ngd", ema=0.95, scale="sum")
NEWTON = Divergence("newton", ema=0.9, scale="mean", second_order=True)
DIVERGENCES = {divergence.name: divergence for divergence in (NGD, NEWTON)}


def divergence_named(divergence: str | Divergence) -> Divergence:
    """A divergence by name, or itself."""
    if isinstance(divergence, Divergence):
        return divergence
    if divergence not in DIVERGENCES:
        known = ", ".join(sorted(DIVERGENCES))
        raise ValueError(f"divergence: unknown {divergence!r}; choose one of {known}, or pass a Divergence")
    return DIVERGENCES[divergence]

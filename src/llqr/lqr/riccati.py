"""The Riccati recursion, the rollout of its solution, the exact step in one call, and the objective J it minimises."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from llqr.lqr.cost_blocks import CurvatureScale, DivergenceName, LayerwiseLQR, StageBlocks, costs
from llqr.lqr.linearisation import DEFAULT_MAX_DIMENSION, LossFunction, linearise


class NoMinimiserError(ValueError):
    """The quadratic model is not strictly convex, so it has no unique minimiser."""


@dataclass(frozen=True)
class StagePolicy:
    """The best response δθ_i = -(K_i δx_i + k_i), and the remaining cost ½ δx_i^T P_i δx_i + p_i . δx_i."""

    K: Tensor
    k: Tensor
    P: Tensor
    p: Tensor


def riccati(lqr: LayerwiseLQR) -> tuple[StagePolicy, ...]:
    """The backward recursion from P_N = Q_N, p_N = ∇ℓ; one policy per stage, first stage first.

    With P, p the cost to go after stage i:

        S = R + B^T P B        G = M + B^T P A        h = B^T p
        K = S^-1 G             k = S^-1 h
        P <- Q + A^T P A - G^T K                      p <- A^T p - G^T k

    The pivots S_i are the Schur complements of H + damping I, last stage first: all are positive definite exactly when
    that matrix is, and `NoMinimiserError` is raised when one is not.
    """
    P, p = lqr.Q_N, lqr.output_gradient
    policies: list[StagePolicy] = []
    for block in reversed(lqr.stages):
        A, B = block.A, block.B
        PB = P @ B
        factor = _cholesky(block.R + B.mT @ PB, block, lqr)
        G, h = block.M + PB.mT @ A, B.mT @ p
        K, k = torch.cholesky_solve(G, factor), torch.cholesky_solve(h.unsqueeze(1), factor).squeeze(1)
        P = block.Q + A.mT @ P @ A - G.mT @ K
        P = (P + P.mT) / 2  # symmetric in exact arithmetic; rounding must not accumulate with depth
        p = A.mT @ p - G.mT @ k
        policies.append(StagePolicy(K, k, P, p))
    return tuple(reversed(policies))


def rollout(lqr: LayerwiseLQR, control: Callable[[int, Tensor], Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Run δx_{i+1} = A_i δx_i + B_i δθ_i from δx_0 = 0 with δθ_i = control(i, δx_i): (δx_0..δx_N, δθ_0..δθ_{N-1})."""
    states = [lqr.Q_N.new_zeros(lqr.stages[0].A.shape[1])]
    controls: list[Tensor] = []
    for index, block in enumerate(lqr.stages):
        controls.append(control(index, states[-1]))
        states.append(block.A @ states[-1] + block.B @ controls[-1])
    return states, controls


def solve(lqr: LayerwiseLQR) -> dict[str, Tensor]:
    """The minimiser δθ of the LQR, per parameter: `riccati` backward, then the rollout of its policies forward.

    It equals the dense step -(H + damping I)^-1 g.

    >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double().eval()
    >>> x, y = torch.randn(5, 3).double(), torch.tensor([0, 1, 0, 1, 1])
    >>> lqr = costs(linearise(model, nn.functional.cross_entropy, (x, y)), "ngd", damping=0.1)
    >>> step = solve(lqr)
    >>> bool(relaxed_objective(lqr, step) < 0)
    True
    """
    policies = riccati(lqr)
    _, controls = rollout(lqr, lambda index, dx: -(policies[index].K @ dx + policies[index].k))
    named: dict[str, Tensor] = {}
    for block, delta in zip(lqr.stages, controls, strict=True):
        named |= block.stage.unpack(delta)
    return named


def _cholesky(pivot: Tensor, block: StageBlocks, lqr: LayerwiseLQR) -> Tensor:
    factor: Tensor
    factor, info = torch.linalg.cholesky_ex(pivot)
    if not pivot.numel():
        return factor
    if not bool(pivot.isfinite().all()):
        raise NoMinimiserError(f"The Riccati pivot of {block.stage.title} is not finite.")
    # Whether a pivot at the level of rounding factorises is luck, and its solution is meaningless either way.
    rounding = len(pivot) * torch.finfo(pivot.dtype).eps * pivot.diagonal().abs().amax()
    if int(info) or bool(factor.diagonal().square().amin() <= rounding):
        smallest = float(torch.linalg.eigvalsh(pivot)[0])
        kind = "indefinite" if smallest < -float(rounding) else "singular"
        raise NoMinimiserError(
            f"The Riccati pivot of {block.stage.title} is {kind} (smallest eigenvalue {smallest:.3g}), so the "
            f"{lqr.divergence} model has no unique minimiser; raise `damping` (now {lqr.damping:g})."
        )
    return factor


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

    >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double().eval()
    >>> x, y = torch.randn(5, 3).double(), torch.tensor([0, 1, 0, 1, 1])
    >>> step = exact_step(model, nn.functional.cross_entropy, (x, y), divergence="ngd", damping=0.1)
    >>> {name: tuple(delta.shape) for name, delta in step.items()}
    {'0.weight': (4, 3), '0.bias': (4,), '2.weight': (2, 4), '2.bias': (2,)}
    """
    linearisation = linearise(model, loss_fn, batch, max_dimension=max_dimension)
    return solve(costs(linearisation, divergence, damping=damping, curvature_scale=curvature_scale))


def relaxed_objective(lqr: LayerwiseLQR, delta: Mapping[str, Tensor]) -> Tensor:
    """J(δθ) = ∇ℓ.δx_N + ½ δx_N^T Q_N δx_N + Σ_i [½ δx_i^T Q_i δx_i + ½ δθ_i^T R_i δθ_i + δθ_i^T M_i δx_i].

    `delta` maps every trainable parameter's name to a tensor of its shape; J is differentiable in it. It equals
    g.δθ + ½ δθ^T H δθ + ½ damping |δθ|².

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

"""Compare the exact layerwise LQR step with the dense second-order step it must equal.

Run:  python examples/exact_lqr.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, jacrev

from llqr.lqr import costs, linearise, relaxed_objective, solve

MARGIN = 0.1  # the smallest eigenvalue after damping

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 4, 3, stride=2), nn.GELU(), nn.Flatten(), nn.Linear(36, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 5)
)
model = model.double().eval()
x, y = torch.randn(16, 1, 8, 8).double(), torch.randint(5, (16,))

names, values = zip(*model.named_parameters(), strict=True)
theta = torch.cat([value.detach().flatten() for value in values])


def named(flat: torch.Tensor) -> dict[str, torch.Tensor]:
    pieces = flat.split([value.numel() for value in values])
    return {n: piece.reshape(v.shape) for n, v, piece in zip(names, values, pieces, strict=True)}


def outputs(flat: torch.Tensor) -> torch.Tensor:
    return functional_call(model, named(flat), (x,))


def loss(flat: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs(flat), y)


def dense_curvature(divergence: str) -> torch.Tensor:
    """H on all parameters at once: the Hessian, J^T (∇²ℓ) J, or the Fisher summed over the batch."""
    if divergence == "newton":
        return jacrev(grad(loss))(theta)
    J = jacrev(outputs)(theta)
    p = outputs(theta).softmax(dim=1)
    fisher = torch.einsum("nci,ncd,ndj->ij", J, torch.diag_embed(p) - p[:, :, None] * p[:, None, :], J)
    return fisher / len(x) if divergence == "gauss-newton" else fisher


linear = linearise(model, F.cross_entropy, (x, y))
g = grad(loss)(theta)

print(f"{len(theta)} parameters, {len(linear.stages)} stages, batch of {len(x)}, loss {float(linear.loss):.4f}\n")
header = "{:<14}{:>9}{:>9}{:>15}{:>13}{:>13}{:>11}"
row = "{:<14}{:>9.4f}{:>9.4f}{:>15.1e}{:>13.8f}{:>13.8f}{:>11.4f}"
print(header.format("divergence", "damping", "|step|", "LQR vs dense", "J layerwise", "J dense", "new loss"))
for divergence in ("newton", "gauss-newton", "ngd"):
    H = dense_curvature(divergence)
    # The Hessian has negative eigenvalues; the other two matrices are only singular, so that the margin is enough.
    damping = MARGIN + max(0.0, -float(torch.linalg.eigvalsh(H)[0]))
    H += damping * torch.eye(len(theta)).double()
    dense = -torch.linalg.solve(H, g)

    lqr = costs(linear, divergence, damping=damping)
    step = solve(lqr)
    flat = torch.cat([step[name].flatten() for name in names])
    difference = (flat - dense).norm() / dense.norm()
    layerwise, quadratic = relaxed_objective(lqr, step), g @ dense + dense @ H @ dense / 2
    print(row.format(divergence, damping, flat.norm(), difference, layerwise, quadratic, loss(theta + flat)))

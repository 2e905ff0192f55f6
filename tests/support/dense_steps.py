"""Dense references on the flattened parameters, written without stages: what the layerwise LQR must reproduce."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.functional import hessian
from torch.func import functional_call, grad, jacrev

DIVERGENCES = [("newton", None), ("gauss-newton", None), ("ngd", "sum"), ("ngd", "mean"), ("ngd", 0.3)]


@dataclass
class Problem:
    """A network, a loss and a batch; `damping` is left to the test."""

    model: nn.Sequential
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    inputs: Tensor
    targets: Tensor

    @property
    def batch(self) -> tuple[Tensor, Tensor]:
        return self.inputs, self.targets

    @property
    def trainable(self) -> dict[str, Tensor]:
        return {n: p.detach() for n, p in self.model.named_parameters() if p.requires_grad}

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        pieces = flat.split([p.numel() for p in self.trainable.values()])
        return {n: piece.reshape(p.shape) for (n, p), piece in zip(self.trainable.items(), pieces, strict=True)}

    def flat(self, named: dict[str, Tensor]) -> Tensor:
        return torch.cat([named[n].reshape(-1) for n in self.trainable])

    def outputs(self, theta: Tensor) -> Tensor:
        return functional_call(self.model, self.named(theta), (self.inputs,))

    def loss(self, theta: Tensor) -> Tensor:
        return self.loss_fn(self.outputs(theta), self.targets)

    @property
    def theta(self) -> Tensor:
        return self.flat(self.trainable)

    @property
    def gradient(self) -> Tensor:
        return grad(self.loss)(self.theta)

    def curvature(self, divergence: str, scale: str | float | None) -> Tensor:
        if divergence == "newton":
            # Double backward: torch.func.hessian is wrong for layer_norm, and for batch_norm over batch statistics.
            return hessian(self.loss, self.theta)
        if divergence == "gauss-newton":
            shape = self.outputs(self.theta).shape
            J = jacrev(lambda t: self.outputs(t).reshape(-1))(self.theta)
            outputs = self.outputs(self.theta).reshape(-1)
            return J.T @ hessian(lambda o: self.loss_fn(o.reshape(shape), self.targets), outputs) @ J
        # The Fisher from its definition, E_{c ~ p} of the outer products of the score.
        scores = jacrev(lambda t: F.log_softmax(self.outputs(t), dim=1))(self.theta)
        p = self.outputs(self.theta).softmax(dim=1)
        fisher = torch.einsum("nc,nci,ncj->ij", p, scores, scores)
        return fisher * {"sum": 1.0, "mean": 1.0 / len(p)}.get(scale, scale)

    def convex_damping(self, H: Tensor, margin: float = 0.1) -> float:
        """A damping that leaves the smallest eigenvalue of H + damping I at `margin` or above."""
        return max(0.0, -float(torch.linalg.eigvalsh(H)[0])) + margin


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def classification(*stages: nn.Module, inputs: tuple[int, ...], classes: int, smoothing: float = 0.0) -> Problem:
    model = nn.Sequential(*stages).double().eval()
    return Problem(
        model,
        lambda out, y: F.cross_entropy(out, y, label_smoothing=smoothing),
        torch.randn(inputs, dtype=torch.float64),
        torch.randint(classes, inputs[:1]),
    )


def regression(*stages: nn.Module, inputs: tuple[int, ...]) -> Problem:
    model = nn.Sequential(*stages).double().eval()
    x = torch.randn(inputs, dtype=torch.float64)
    return Problem(model, F.mse_loss, x, torch.randn_like(model(x)).detach())


def _frozen(module: nn.Module, *names: str) -> nn.Module:
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    return module


class Residual(nn.Module):
    """A skip connection inside one stage."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * torch.tanh(self.inner(x))


def _settled_batch_norm(channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2.0)
    return norm


def _convolutional() -> list[nn.Module]:
    return [nn.Conv2d(1, 2, 2), nn.SiLU(), nn.Conv2d(2, 2, 2, stride=2), nn.Flatten(), nn.Linear(2, 3)]


NETWORKS: dict[str, Callable[[], Problem]] = {
    "tanh": lambda: classification(
        nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3), inputs=(6, 3), classes=3
    ),
    "relu in place": lambda: classification(
        nn.Linear(3, 5), nn.ReLU(inplace=True), nn.Linear(5, 3), inputs=(7, 3), classes=3
    ),
    "gelu, smoothed": lambda: classification(
        nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 3), inputs=(5, 4), classes=3, smoothing=0.1
    ),
    "convolutional": lambda: classification(*_convolutional(), inputs=(4, 1, 4, 4), classes=3),
    "batch norm, running": lambda: classification(
        nn.Conv2d(1, 2, 2),
        _settled_batch_norm(2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(8, 3),
        inputs=(4, 1, 3, 3),
        classes=3,
    ),
    "batch norm over the batch": lambda: classification(
        nn.Linear(3, 4),
        nn.BatchNorm1d(4, track_running_stats=False),
        nn.Tanh(),
        nn.Linear(4, 3),
        inputs=(6, 3),
        classes=3,
    ),
    "layer norm": lambda: classification(
        nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 3), inputs=(5, 3), classes=3, smoothing=0.2
    ),
    "bare ends": lambda: classification(
        nn.Flatten(), nn.Linear(4, 3), nn.Softplus(), nn.Linear(3, 3), nn.Hardtanh(-9, 9), inputs=(5, 2, 2), classes=3
    ),
    "frozen": lambda: classification(
        _frozen(nn.Linear(3, 4), "weight", "bias"),
        nn.Tanh(),
        _frozen(nn.Linear(4, 4), "bias"),
        nn.Tanh(),
        nn.Linear(4, 3),
        inputs=(5, 3),
        classes=3,
    ),
    "residual": lambda: classification(nn.Linear(3, 3), Residual(3), Residual(3), inputs=(5, 3), classes=3),
    "embedding": lambda: _embedding(),
    "regression": lambda: regression(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Sigmoid(), inputs=(6, 3)),
    "convolutional regression": lambda: regression(
        nn.Conv2d(1, 2, 2), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(2, 2), inputs=(4, 1, 3, 3)
    ),
}


def _embedding() -> Problem:
    problem = classification(
        nn.Embedding(5, 2), nn.Flatten(), nn.Tanh(), nn.Linear(6, 3), inputs=(6, 3), classes=3, smoothing=0.1
    )
    problem.inputs = torch.randint(5, (6, 3))
    return problem

"""How sharp a solution is: the top eigenvalue of the Hessian `H`, and of `U^1/2 H U^1/2`, the sharpness in the metric.

The Hessian is that of the mean loss on a batch, with the network in eval mode and without weight decay. Of a metric
whose blocks are not symmetric, as unconstrained K-FAC factors may become, the symmetric part `(U + U^T) / 2` is used:
`g.Ug` and the norms of the probes depend on nothing else. Where even this is not positive, `U^1/2` does not exist, and
no perceived sharpness is reported.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from llqr import Metric
from llqr.curvature import ENGINES, NEWTON, Batch, Curvature, Forward, Loss, Problem, frozen
from llqr.curvature.curvature import ASYMMETRY

Operator = Callable[[Tensor], Tensor]


class LossSurface:
    """The mean loss on one batch as a function of all weights in one flat vector.

    Args:
        model: the network at the weights of interest; it is not changed.
        loss_fn: the mean loss of outputs and targets.
        batch: inputs and targets.
        forward: how outputs are computed, `model(inputs)` by default.
        piece: how many samples go through the network at once, all by default.
    """

    def __init__(
        self, model: nn.Module, loss_fn: Loss, batch: Batch, *, forward: Forward | None = None, piece: int | None = None
    ) -> None:
        self.model = model
        self.parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
        self.device = next(iter(self.parameters.values())).device
        self.engine = "double-backward"
        self._problem = Problem(model, loss_fn, batch, self.parameters, forward=forward, micro_batch=piece)

    @property
    def weights(self) -> Tensor:
        return self.flat(self.parameters)

    def loss(self) -> float:
        """The mean loss at the weights of the model."""
        with frozen(self.model, self.device), torch.no_grad():
            outputs = torch.cat([self._problem.outputs(self.parameters, piece) for piece in self._problem.pieces])
            return self._problem.loss(outputs).item()

    def hessian(self, vector: Tensor) -> Tensor:
        """`H v` at the weights of the model."""
        with frozen(self.model, self.device), torch.no_grad():
            return self.flat(self._curvature.product(self.named(vector)))

    def flat(self, named: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([named[name].reshape(-1) for name in self.parameters])

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        parts = vector.split([p.numel() for p in self.parameters.values()])
        return {name: v.view(p.shape) for (name, p), v in zip(self.parameters.items(), parts, strict=True)}

    @cached_property
    def _curvature(self) -> Curvature:
        """Exact where every layer can be differentiated twice, by finite differences otherwise."""
        curvature = Curvature(self._problem, NEWTON, ENGINES[self.engine])
        try:
            # Autograd silently treats a kernel without a second derivative as a constant.
            if curvature.asymmetry(curvature.gradient()) <= ASYMMETRY:
                return curvature
        except (NotImplementedError, RuntimeError):
            pass
        self.engine = "finite-differences"
        return Curvature(self._problem, NEWTON, ENGINES[self.engine])


NOT_POSITIVE = "U is not positive: v.Uv < 0 for some v, so that U^1/2 does not exist."


class NotPositive(ValueError):
    """An inner product that gives some vector a negative square."""


@dataclass(frozen=True)
class Eigenvalue:
    """``value``, found in so many ``steps``; ``error`` bounds how far it is from an eigenvalue."""

    value: float
    error: float
    steps: int


def top_eigenvalue(
    h: Operator, start: Tensor, *, u: Operator = lambda v: v, steps: int = 60, tolerance: float = 1e-3
) -> Eigenvalue:
    """The largest eigenvalue of a symmetric `H`, or of `U^1/2 H U^1/2` for a symmetric positive `U`.

    Lanczos with full reorthogonalisation. With `U` it runs on `H U`, which has the eigenvalues of `U^1/2 H U^1/2` and
    is self-adjoint in the inner product `<a, b> = a.U b`: only products with `U` are needed, no root and no inverse.

    Args:
        h: `v -> H v` on flat vectors.
        start: a vector with a component along the eigenvector sought, such as a random one.
        u: `v -> U v`; the identity by default.
        steps: the most products.
        tolerance: stop when the error bound is this fraction of the value.
    """
    basis: list[Tensor] = []
    images: list[Tensor] = []  # U times the basis
    diagonal: list[float] = []
    below: list[float] = []
    candidate, image, norm = _normalised(start, u)
    if norm == 0:
        raise ValueError("start: expected a vector that is not zero.")
    while True:
        basis.append(candidate)
        images.append(image)
        product = h(image)
        diagonal.append(_dot(product, image))
        scale = product.norm().item()
        # Twice, because one pass leaves rounding errors that grow into copies of converged eigenvalues.
        for _ in range(2):
            for earlier, its_image in zip(basis, images, strict=True):
                product = product - _dot(product, its_image) * earlier
        candidate, image, norm = _normalised(product, u, floor=1e-12 * scale)
        # Eigenvalues, ascending, and eigenvectors of the tridiagonal matrix.
        off = torch.diag(torch.tensor(below, dtype=torch.float64), 1)
        ritz, vectors = torch.linalg.eigh(torch.diag(torch.tensor(diagonal, dtype=torch.float64)) + off + off.T)
        value, error = ritz[-1].item(), norm * abs(vectors[-1, -1].item())
        if len(diagonal) >= min(steps, start.numel()) or error <= tolerance * abs(value):
            return Eigenvalue(value, error, len(diagonal))
        below.append(norm)


def _normalised(vector: Tensor, u: Operator, floor: float = 0.0) -> tuple[Tensor, Tensor, float]:
    """A vector of length 1 in the inner product, its image under `U`, and the length it had; 0 if below ``floor``."""
    image, length = u(vector), vector.norm().item()
    square = _dot(vector, image)
    if square < -1e-6 * length * image.norm().item():
        raise NotPositive(NOT_POSITIVE)
    norm = max(square, 0.0) ** 0.5 if length > floor else 0.0
    return (vector / norm, image / norm, norm) if norm > 0 else (vector, image, 0.0)


def _dot(a: Tensor, b: Tensor) -> float:
    return torch.dot(a.double(), b.double()).item()


@dataclass(frozen=True)
class Sharpness:
    """Both eigenvalues; ``perceived`` is None, with a reason, where `U` is not positive."""

    top: Eigenvalue
    perceived: Eigenvalue | None
    reason: str = ""


def measure(
    surface: LossSurface, metric: Metric | None = None, *, steps: int = 60, tolerance: float = 1e-3
) -> Sharpness:
    """The sharpness of a solution; without a metric, `U = I`, the perceived one is the same number."""
    weights = surface.weights
    start = torch.randn(weights.numel(), generator=torch.Generator().manual_seed(0)).to(weights)
    find = partial(top_eigenvalue, surface.hessian, start, steps=steps, tolerance=tolerance)
    top = find()
    if metric is None or not metric.learned:
        return Sharpness(top, top)
    u = partial(symmetric_part, surface, metric)
    try:
        if top_eigenvalue(lambda v: -u(v), start, steps=steps, tolerance=tolerance).value > 1e-6:
            raise NotPositive(NOT_POSITIVE)
        return Sharpness(top, find(u=u))
    except NotPositive as error:
        return Sharpness(top, None, str(error))


def symmetric_part(surface: LossSurface, metric: Metric, vector: Tensor) -> Tensor:
    """`(U + U^T) v / 2`: half the gradient of `v.Uv`, whatever the structure."""
    named = surface.named(vector)
    with torch.enable_grad():
        packed = [part.detach().requires_grad_() for part in metric.pack(named)]
        squares = [
            (part * group.apply({name: factor.to(part.dtype) for name, factor in own.items()}, part)).sum()
            for group, own, part in zip(metric.groups, metric.factors(), packed, strict=True)
        ]
        gradients = torch.autograd.grad(squares, packed)
    return surface.flat(metric.unpack([gradient / 2 for gradient in gradients], named))

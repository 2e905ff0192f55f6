"""The largest eigenvalue of an operator that is given by its products."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Operator = Callable[[Tensor], Tensor]


class NotPositive(ValueError):
    """An inner product that gives some vector a negative square."""


@dataclass(frozen=True)
class Eigenpair:
    """``value`` and a unit ``vector`` for it; ``error`` bounds how far ``value`` is from an eigenvalue."""

    value: float
    vector: Tensor
    error: float
    steps: int


def top_eigenpair(
    h: Operator, start: Tensor, *, u: Operator | None = None, steps: int = 60, tolerance: float = 1e-3
) -> Eigenpair:
    """The largest eigenvalue of a symmetric `H`, or of `U^1/2 H U^1/2` for a symmetric positive `U`.

    Lanczos with full reorthogonalisation. With `U` it runs on `H U`, which has the eigenvalues of `U^1/2 H U^1/2` and
    is self-adjoint in the inner product `<a, b> = a.U b`: only products with `U` are needed, no root and no inverse.
    The vector is then the eigenvector `x = U y` of `U H`, the displacement with the largest `x.H x / x.U^-1 x`.

    Args:
        h: `v -> H v` on flat vectors.
        start: a vector with a component along the eigenvector sought, such as a random one.
        u: `v -> U v`; the identity if left out.
        steps: the most products.
        tolerance: stop when the error bound is this fraction of the value.
    """
    basis: list[Tensor] = []
    images: list[Tensor] = []  # U times the basis; the basis itself without U
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
        error = norm * abs(vectors[-1, -1].item())
        value = ritz[-1].item()
        if len(diagonal) >= min(steps, start.numel()) or error <= tolerance * abs(value):
            break
        below.append(norm)
    vector = torch.zeros_like(start)
    for coefficient, its_image in zip(vectors[:, -1].tolist(), images, strict=True):
        vector = vector + coefficient * its_image
    return Eigenpair(value, vector / vector.norm(), error, len(diagonal))


def _normalised(vector: Tensor, u: Operator | None, floor: float = 0.0) -> tuple[Tensor, Tensor, float]:
    """A vector of length 1 in the inner product, its image under `U`, and the length it had; 0 if below ``floor``."""
    image = vector if u is None else u(vector)
    square = _dot(vector, image)
    length = vector.norm().item()
    if length <= floor:
        return vector, image, 0.0
    if square < -1e-6 * length * image.norm().item():
        raise NotPositive("U is not positive: v.Uv < 0 for some v, so that U^1/2 does not exist.")
    norm = max(square, 0.0) ** 0.5
    return (vector / norm, image / norm, norm) if norm > 0 else (vector, image, 0.0)


def _dot(a: Tensor, b: Tensor) -> float:
    return torch.dot(a, b).item() if a.dtype == torch.float64 else torch.dot(a.double(), b.double()).item()

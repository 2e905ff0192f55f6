"""The quadratic model at the current weights on one batch: loss, gradient `g`, and the product `v -> H v`."""

import sys
from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import Tensor

from llqr.curvature.batch import counted_terms
from llqr.curvature.derivatives import ENGINES, Derivatives, Product, UnconnectedError
from llqr.curvature.divergence import Divergence, Scale, check_scale
from llqr.curvature.problem import Problem
from llqr.curvature.quadratic import Named, QuadraticModel


class Curvature:
    """`g = J^T w` and `H v = scale * J^T Q J v`, with `w` the slope of the mean loss in the outputs.

    For Newton, `H` also has the second derivatives of the network.

    Args:
        problem: model, loss and batch.
        divergence: what `Q` is the Hessian of.
        derivatives: how to compute `J v` and `J^T u`, one of `ENGINES`.
    """

    def __init__(self, problem: Problem, divergence: Divergence, derivatives: type[Derivatives]) -> None:
        self._problem, self._divergence, self._derivatives = problem, divergence, derivatives
        # One piece: linearise once and keep it. Several: linearise anew for every product, which bounds the memory.
        self._kept: Derivatives | None = None
        if len(problem.pieces) == 1:
            self._kept = self._network(problem.pieces[0])
        with torch.no_grad():
            pieces = [self._kept.outputs] if self._kept else problem.outputs_of_pieces()
        self._rows = [piece.shape[0] for piece in pieces] if len(pieces) > 1 else None
        outputs = _joined(pieces)
        with torch.enable_grad():
            z = outputs.detach().requires_grad_()
            loss = problem.loss(z)
            (self._slope,) = torch.autograd.grad(loss, z)
        self.loss = loss.detach()
        self.terms = counted_terms(problem.loss_fn, problem.targets, outputs).to(outputs.dtype)
        self._q = divergence.output_hessian(problem.loss, outputs)
        self._scale = _resolve(divergence.scale, self.terms)
        self._second: Product | None = None
        if divergence.second_order and self._kept:
            self._second = self._kept.second(self._scale * self._slope)

    def model(self) -> QuadraticModel:
        return QuadraticModel(self.loss, self.gradient(), self.product, self.terms)

    def gradient(self) -> Named:
        """`g = J^T w`."""
        parts = zip(self._problem.pieces, self._cut(self._slope), strict=True)
        gradient = _sum(self._network(piece).vjp(w) for piece, w in parts)
        for name, part in gradient.items():
            if part.layout != torch.strided:
                raise TypeError(f"model: the gradient of parameter {name!r} is sparse, which a metric does not support")
        return gradient

    def product(self, v: Mapping[str, Tensor]) -> Named:
        """`H v`."""
        Jv = self._forward(v)
        # Scaled here, where the tensors are small, and not after they are pulled back to the parameters.
        QJv = self._scale * self._q(Jv)
        parts = zip(self._problem.pieces, self._cut(QJv), self._cut(self._slope), strict=True)
        return _sum(self._pulled(self._network(piece), u, w, v) for piece, u, w in parts)

    def _forward(self, v: Mapping[str, Tensor]) -> Tensor:
        """`J v`."""
        return _joined([self._network(piece).jvp(v) for piece in self._problem.pieces])

    def _pulled(self, f: Derivatives, u: Tensor, w: Tensor, v: Mapping[str, Tensor]) -> Named:
        """`J^T u`; for Newton also `scale * (d^2/dtheta^2 <w, f(theta)>) v`."""
        pulled = f.vjp(u)
        if not self._divergence.second_order:
            return pulled
        second = self._second or f.second(self._scale * w)
        return _sum([pulled, second(v)])

    def asymmetry(self, gradient: Named) -> float:
        """`|<w, J g> - <J^T w, g>| / |g|^2`: 0 for correct derivatives.

        Forward mode differentiates through `torch.no_grad` and straight-through tricks, which the backward pass treats
        as constant.
        """
        along = float((self._forward(gradient).double() * self._slope.double()).sum())
        square = sum(float(part.double().square().sum()) for part in gradient.values())
        return abs(along - square) / square if square else 0.0

    def _network(self, piece: object) -> Derivatives:
        """The network linearised on a piece of the batch; never held in a variable, or there would be two at a time."""
        if self._kept:
            return self._kept
        problem = self._problem
        f = partial(problem.outputs, inputs=piece)
        compiled = partial(f, compiled=True) if "torch._dynamo" in sys.modules else None
        return self._derivatives(f, problem.parameters, problem.precision, compiled)

    def _cut(self, rows: Tensor) -> list[Tensor]:
        return [rows] if self._rows is None else list(rows.split(self._rows))


def _joined(pieces: list[Tensor]) -> Tensor:
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def _sum(parts: Iterable[Named]) -> Named:
    """One part after another, so that no two of a generator are held."""
    total: Named = {}
    for part in parts:
        total = {name: total[name] + part[name] for name in part} if total else part
    return total


def _resolve(scale: Scale, terms: Tensor) -> Tensor:
    check_scale(scale)
    if scale == "sum":
        return terms
    return torch.full_like(terms, 1.0 if scale == "mean" else float(scale))


#: "auto" refuses an engine whose forward and backward derivatives disagree by more (relative). Rounding in float32 and
#: tf32 stays below it; coarser dtypes get more room.
ASYMMETRY = 0.01


def automatic(problem: Problem) -> tuple[str, ...]:
    """What "auto" tries, in this order: exact before approximate, and of the exact ones the cheaper first.

    Two backward passes do not repeat the forward pass for every product, but keep the graph of a backward pass (and
    make it again for every piece of a batch), and the second derivative of a convolution costs more than its forward
    pass. So they come first on a CPU if weights are matrices and vectors, and the batch is in one piece.
    """
    cheap = problem.device.type == "cpu" and problem.undivided and all(p.ndim <= 2 for p in problem.parameters.values())
    first = ("double-backward", "forward") if cheap else ("forward", "double-backward")
    return (*first, "finite-differences")


def choose_engine(problem: Problem, divergence: Divergence) -> tuple[str, list[str]]:
    """The first engine that this model supports, and why those before it were refused."""
    refused: list[str] = []
    for name in automatic(problem):
        reason = _refusal(problem, divergence, ENGINES[name])
        if reason is None:
            return name, refused
        refused.append(f"{name}: {reason}")
    raise RuntimeError("engine: no way to differentiate this model works. " + " | ".join(refused))


def _refusal(problem: Problem, divergence: Divergence, derivatives: type[Derivatives]) -> str | None:
    """Why an engine does not suit a model; None if it does. Keeps no exception, which would keep the graph alive."""
    try:
        curvature = Curvature(problem, divergence, derivatives)
        gradient = curvature.gradient()
        curvature.product(gradient)
        tolerance = max(ASYMMETRY, torch.finfo(problem.precision).eps ** 0.5)
        if derivatives.exact and curvature.asymmetry(gradient) > tolerance:
            return "its forward and backward derivatives of this model disagree"
    except (torch.linalg.LinAlgError, torch.OutOfMemoryError, torch.AcceleratorError, UnconnectedError):  # type: ignore[attr-defined]
        raise  # a bad batch, a device in trouble or a model without a gradient: no other engine would help
    except RuntimeError as error:
        if "allocate memory" in str(error):  # the same on a CPU, where it has no class of its own
            raise
        return str(error).splitlines()[0]
    return None

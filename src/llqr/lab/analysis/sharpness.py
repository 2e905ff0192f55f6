"""How sharp a solution is: the top eigenvalue of the Hessian `H`, and of `U^1/2 H U^1/2`, the sharpness in the metric.

The Hessian is that of the mean loss on a batch, with the network in eval mode and without weight decay. Of a metric
whose blocks are not symmetric, as unconstrained K-FAC factors may become, the symmetric part `(U + U^T) / 2` is used:
`g.Ug` and the norms of the probes depend on nothing else. Where even this is not positive, `U^1/2` does not exist, and
no perceived sharpness is reported.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn

from llqr import Metric
from llqr.curvature import ENGINES, NEWTON, Batch, Curvature, Forward, Loss, Problem, frozen
from llqr.curvature.curvature import ASYMMETRY
from llqr.lab.analysis.lanczos import Eigenpair, NotPositive, top_eigenpair

# Exact for every layer that can be differentiated twice; finite differences for the others.
HESSIAN_ENGINES = ("double-backward", "finite-differences")
STEPS = 60
"""The most products for an eigenvalue."""


class LossSurface:
    """The mean loss on one batch as a function of all weights in one flat vector.

    Args:
        model: the network at the weights of interest; it is not changed.
        loss_fn: the mean loss of outputs and targets.
        batch: inputs and targets.
        forward: how outputs are computed, `model(inputs)` by default.
        piece: how many samples go through the network at once when the whole batch does not fit.
    """

    def __init__(
        self, model: nn.Module, loss_fn: Loss, batch: Batch, *, forward: Forward | None = None, piece: int | None = None
    ) -> None:
        self.model = model
        self.parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
        self.device = next(iter(self.parameters.values())).device
        self.engine = ""
        self.on_work: Callable[[], None] = lambda: None
        """Called after every loss and every product, of which a measurement makes a hundred or more."""
        self._problem = partial(Problem, model, loss_fn, batch, self.parameters, forward=forward)
        self._piece = piece

    @property
    def weights(self) -> Tensor:
        return self.flat(self.parameters)

    def loss(self, weights: Tensor) -> float:
        """The mean loss at other weights than the model's."""
        problem = self._problem(micro_batch=self._piece)
        with frozen(self.model, self.device), torch.no_grad():
            named = self.named(weights)
            outputs = torch.cat([problem.outputs(named, piece) for piece in problem.pieces])
            found = problem.loss(outputs).item()
        self.on_work()
        return found

    def hessian(self, vector: Tensor) -> Tensor:
        """`H v` at the weights of the model."""
        with frozen(self.model, self.device), torch.no_grad():
            product = self.flat(self._curvature.product(self.named(vector)))
        self.on_work()
        return product

    def gradient(self) -> Tensor:
        """`g` at the weights of the model."""
        with frozen(self.model, self.device), torch.no_grad():
            return self.flat(self._curvature.gradient())

    def flat(self, named: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([named[name].reshape(-1) for name in self.parameters])

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        parts = vector.split([p.numel() for p in self.parameters.values()])
        return {name: v.view(p.shape) for (name, p), v in zip(self.parameters.items(), parts, strict=True)}

    @cached_property
    def _curvature(self) -> Curvature:
        """In one piece if it fits into memory, with the first engine that can differentiate the model."""
        *attempts, last = [
            (engine, piece) for engine in HESSIAN_ENGINES for piece in dict.fromkeys((None, self._piece))
        ]
        for attempt in attempts:
            try:
                return self._linearise_by(*attempt)
            except (NotImplementedError, RuntimeError):  # out of memory is one of these
                continue
        return self._linearise_by(*last)

    def _linearise_by(self, engine: str, piece: int | None) -> Curvature:
        curvature = Curvature(self._problem(micro_batch=piece), NEWTON, ENGINES[engine])
        gradient = curvature.gradient()
        curvature.product(gradient)
        # Autograd silently treats a kernel without a second derivative as a constant.
        if ENGINES[engine].exact and curvature.asymmetry(gradient) > ASYMMETRY:
            raise RuntimeError(f"engine: the derivatives of this model by {engine} disagree")
        self.engine = engine
        return curvature


@dataclass(frozen=True)
class Sharpness:
    """Both eigenvalues with their eigenvectors; ``perceived`` is None, with a reason, where `U` is not positive."""

    top: Eigenpair
    perceived: Eigenpair | None
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Without the vectors."""
        pairs = {"top": self.top, "perceived": self.perceived}
        keys = ("value", "error", "steps")
        numbers = {name: pair and {key: getattr(pair, key) for key in keys} for name, pair in pairs.items()}
        return numbers | {"reason": self.reason}


def measure(
    surface: LossSurface, metric: Metric | None = None, *, steps: int = STEPS, tolerance: float = 1e-3, seed: int = 0
) -> Sharpness:
    """The sharpness of a solution; without a metric, `U = I`, the perceived one is the same number."""
    weights = surface.weights
    start = torch.randn(weights.numel(), generator=torch.Generator().manual_seed(seed)).to(weights)
    find = partial(top_eigenpair, surface.hessian, start, steps=steps, tolerance=tolerance)
    top = find()
    if metric is None or not metric.learned:
        return Sharpness(top, top)
    try:
        return Sharpness(top, find(u=partial(symmetric_part, surface, metric)))
    except NotPositive as error:
        return Sharpness(top, None, str(error))


def hessian_trace(surface: LossSurface, *, products: int, seed: int = 0) -> dict[str, float]:
    """Hutchinson's estimate, the mean of `v.Hv` over vectors of random signs, and its standard error."""
    generator = torch.Generator().manual_seed(seed)
    weights = surface.weights
    estimates = []
    for _ in range(products):
        signs = torch.randint(2, weights.shape, generator=generator).mul_(2).sub_(1).to(weights)
        estimates.append(torch.dot(signs.double(), surface.hessian(signs).double()).item())
    return {"value": fmean(estimates), "error": stdev(estimates) / products**0.5, "products": products}


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

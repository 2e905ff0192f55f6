"""`J v`, `J^T u` and second derivatives of a network: linearise once, then multiply. One class for each engine."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from llqr.curvature.quadratic import Named

Function = Callable[[Mapping[str, Tensor]], Tensor]
Product = Callable[[Mapping[str, Tensor]], Named]


class UnconnectedError(RuntimeError):
    """The outputs do not depend on the weights, so that the gradient would be zero."""

    def __init__(self) -> None:
        super().__init__(
            "model: its outputs do not depend on its parameters, of which the gradient would be zero; does it compute "
            "under no_grad, or take its weights from a list or a hook instead of its modules?"
        )


class Derivatives(ABC):
    """A network `f(theta)` linearised at `theta`.

    `J^T u` is one backward pass through a kept graph, which every kernel supports. The engines differ in the forward
    derivative `J v` and in the second derivative of `<w, f>`.

    Args:
        f: the network on one batch.
        theta: the weights to linearise at, by name.
        precision: the coarsest dtype `f` computes in, which may be coarser than that of its outputs.
        compiled: `f` with its compiled parts, which is faster but only has first derivatives; `f` if there are none.
    """

    #: Whether products are exact up to rounding.
    exact: ClassVar[bool] = True

    def __init__(
        self, f: Function, theta: Mapping[str, Tensor], precision: torch.dtype, compiled: Function | None = None
    ) -> None:
        self.f, self.compiled, self.precision = f, compiled or f, precision
        self.theta = {name: parameter.detach().requires_grad_() for name, parameter in theta.items()}

    @cached_property
    def _graph(self) -> Tensor:
        """The outputs with their graph, made when they are first needed: `J v` of most engines does without."""
        with torch.enable_grad():
            return self.f(self.theta)

    @property
    def outputs(self) -> Tensor:
        return self._graph.detach()

    def vjp(self, u: Tensor, *, create_graph: bool = False) -> Named:
        """`J^T u`."""
        if not self._graph.requires_grad:
            raise UnconnectedError
        theta = list(self.theta.values())
        found = torch.autograd.grad(
            self._graph, theta, u, retain_graph=True, create_graph=create_graph, allow_unused=True
        )
        if all(gradient is None for gradient in found):
            raise UnconnectedError
        gradients = (torch.zeros_like(p) if g is None else g for p, g in zip(theta, found, strict=True))
        return dict(zip(self.theta, gradients, strict=True))

    @abstractmethod
    def jvp(self, v: Mapping[str, Tensor]) -> Tensor:
        """`J v`."""

    def second(self, w: Tensor) -> Product:
        """`v -> (d^2/dtheta^2 <w, f(theta)>) v`, linearised once; here by reverse mode alone."""
        slopes = self.vjp(w, create_graph=True)
        return lambda v: dict(zip(self.theta, _along(slopes, v, list(self.theta.values())), strict=True))

    def _constant(self) -> Named:
        return {name: parameter.detach() for name, parameter in self.theta.items()}


class ForwardMode(Derivatives):
    """Forward-mode differentiation with dual numbers: every product repeats the pass, tangents beside values."""

    def jvp(self, v: Mapping[str, Tensor]) -> Tensor:
        tangent: Tensor = torch.func.jvp(self.f, (self._constant(),), (dict(v),))[1]
        return tangent

    def second(self, w: Tensor) -> Product:
        if self.precision.itemsize < 4:
            # Under autocast, tangents of a backward pass may be wider than its values, and no convolution takes both.
            return super().second(w)
        gradient = torch.func.grad(lambda theta: (self.f(theta) * w).sum())

        def product(v: Mapping[str, Tensor]) -> Named:
            tangent: Named = torch.func.jvp(gradient, (self._constant(),), (dict(v),))[1]
            return tangent

        return product


class DoubleBackward(Derivatives):
    """Reverse mode twice: `J v` is the derivative of `J^T u` in `u`, along `v`."""

    _transposed: Named | None = None

    def jvp(self, v: Mapping[str, Tensor]) -> Tensor:
        if self._transposed is None:
            self._u = torch.zeros_like(self.outputs, requires_grad=True)
            self._transposed = self.vjp(self._u, create_graph=True)
        return _along(self._transposed, v, [self._u])[0]


def _along(slopes: Named, v: Mapping[str, Tensor], inputs: list[Tensor]) -> Sequence[Tensor]:
    """The derivatives of `<slopes, v>` in the inputs."""
    used = {name: slope for name, slope in slopes.items() if slope.requires_grad}
    if not used:
        return [torch.zeros_like(one) for one in inputs]
    given = [v[name] for name in used]
    return torch.autograd.grad(list(used.values()), inputs, given, retain_graph=True, materialize_grads=True)


class CentralDifferences(Derivatives):
    """`J v = (f(theta + h v) - f(theta - h v)) / 2h`, for kernels that have first derivatives only, such as fused
    attention."""

    exact = False

    def jvp(self, v: Mapping[str, Tensor]) -> Tensor:
        h = self._step(v)
        with torch.no_grad():
            ahead, behind = self.compiled(self._moved(v, h)), self.compiled(self._moved(v, -h))
        return (ahead - behind) / (2 * h).to(ahead.dtype)

    def second(self, w: Tensor) -> Product:
        def product(v: Mapping[str, Tensor]) -> Named:
            h = self._step(v)
            return _quotient(self._vjp_at(self._moved(v, h), w), self._vjp_at(self._moved(v, -h), w), 2 * h)

        return product

    def _vjp_at(self, theta: Named, w: Tensor) -> Named:
        # A checkpointed model would recompute activations at its own weights, not at those that have moved.
        with torch.autograd.graph.disable_saved_tensors_hooks(
            "engine: second derivatives by differences are wrong for a model that recomputes activations "
            "(torch.utils.checkpoint); choose 'double-backward'"
        ):
            return type(self)(self.f, theta, self.precision).vjp(w)

    def _step(self, v: Mapping[str, Tensor]) -> Tensor:
        """`|h v| = eps^(1/2)`.

        Smaller than what balances the errors of a central difference along an arbitrary direction: a refresh multiplies
        `U g`, along which networks are curved most, and the rounding errors of many outputs average out.
        """
        norm = torch.stack([part.float() for part in torch._foreach_norm(list(v.values()))]).norm()
        width = torch.finfo(self.precision).eps ** 0.5
        step: Tensor = width / norm.clamp_min(torch.finfo(torch.float32).tiny ** 0.5)
        return step

    def _moved(self, v: Mapping[str, Tensor], h: Tensor) -> Named:
        """`theta + h v`."""
        theta = [parameter.detach() for parameter in self.theta.values()]
        moved = torch._foreach_add(theta, torch._foreach_mul([v[name] for name in self.theta], h))
        return {name: part.to(p.dtype) for (name, p), part in zip(self.theta.items(), moved, strict=True)}


class OneSidedDifferences(CentralDifferences):
    """`J v = (f(theta + h v) - f(theta)) / h`: half the passes of a central difference, less exact."""

    @cached_property
    def _here(self) -> Tensor:
        """`f(theta)` by the same code as what it is subtracted from: compiled code rounds differently."""
        return self.outputs if self.compiled is self.f else self.compiled(self._constant())

    def jvp(self, v: Mapping[str, Tensor]) -> Tensor:
        h = self._step(v)
        with torch.no_grad():
            here = self._here
            return (self.compiled(self._moved(v, h)) - here) / h.to(here.dtype)

    def second(self, w: Tensor) -> Product:
        here = self.vjp(w)

        def product(v: Mapping[str, Tensor]) -> Named:
            h = self._step(v)
            return _quotient(self._vjp_at(self._moved(v, h), w), here, h)

        return product


def _quotient(ahead: Named, behind: Named, distance: Tensor) -> Named:
    return {name: (ahead[name] - behind[name]) / distance.to(ahead[name].dtype) for name in ahead}


#: How each engine differentiates the network. "linearised" traces forward mode, see `llqr.curvature.traced`.
ENGINES: dict[str, type[Derivatives]] = {
    "forward": ForwardMode,
    "double-backward": DoubleBackward,
    "finite-differences": CentralDifferences,
    "one-sided-differences": OneSidedDifferences,
    "linearised": ForwardMode,
}

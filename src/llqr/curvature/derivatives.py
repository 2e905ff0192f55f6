"""How `J v`, `J^T u` and second derivatives of the network are computed: linearise once, then multiply."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from llqr.curvature.quadratic import Named

#: Forward mode has one stack of levels for the whole process: two threads in it disturb one another.
FORWARD_MODE = threading.RLock()

#: A model that checkpoints would compute activations again at its own weights, not at those that have moved.
RECOMPUTED = (
    "engine: second derivatives by differences are wrong for a model that computes activations again in its backward "
    "pass (torch.utils.checkpoint); choose 'double-backward'"
)

Function = Callable[[Mapping[str, Tensor]], Tensor]


class UnconnectedError(RuntimeError):
    """The outputs of a model do not depend on the weights that it was given, so that its gradient would be zero."""

    def __init__(self, names: Iterable[str]) -> None:
        shown = list(names)
        more = ", ..." if len(shown) > 5 else ""
        super().__init__(
            f"model: its outputs do not depend on the weights given for {', '.join(shown[:5])}{more}, of which the "
            "gradient would be zero: does it replace its parameters in a hook (as FSDP does), keep them in a list, or "
            "compute under no_grad?"
        )


class Derivatives(ABC):
    """A network `f(theta)` linearised at `theta`.

    `J^T u` is the same in all of them: one backward pass through a kept graph, which every kernel supports. They differ
    in the forward derivative `J v` and in the second derivative of `<w, f>`.

    Args:
        precision: the coarsest dtype `f` computes in, which may be coarser than that of its outputs.
        given_away: whether a backward pass is known to give its activations away, as that of compiled code may: each
            needs a forward pass of its own then.
    """

    #: Whether first derivatives of `f`, backward, are enough, which is all that a compiled `f` has.
    first_order: ClassVar[bool] = False
    #: Whether `torch.vmap` can multiply several vectors at once.
    batched: ClassVar[bool] = False

    def __init__(
        self, f: Function, theta: Mapping[str, Tensor], precision: torch.dtype, given_away: bool = False
    ) -> None:
        self.f = f
        self.precision = precision
        self.given_away = given_away
        self.theta = {name: parameter.detach().requires_grad_() for name, parameter in theta.items()}
        with torch.set_grad_enabled(not given_away):
            self._graph = f(self.theta)
        self.outputs = self._graph.detach()

    def vjp(self, u: Tensor) -> Named:
        """`J^T u`."""
        if not self.given_away:
            try:
                return self._gradient(self._graph, u)
            except RuntimeError as error:
                if "donated buffers" not in str(error):
                    raise
            self.given_away, self._graph = True, self.outputs
        with torch.enable_grad():
            graph = self.f(self.theta)
        return self._gradient(graph, u, retain_graph=False)

    @abstractmethod
    def jvp(self, v: Mapping[str, Tensor]) -> Tensor:
        """`J v`."""

    @abstractmethod
    def second(self, w: Tensor) -> Callable[[Mapping[str, Tensor]], Named]:
        """`v -> (d^2/dtheta^2 <w, f(theta)>) v`, linearised once."""

    def _backward_twice(self, w: Tensor) -> Callable[[Mapping[str, Tensor]], Named]:
        """`second` by reverse mode alone."""
        slopes = self._gradient(self._graph, w, create_graph=True)
        return lambda v: dict(zip(self.theta, _along(slopes, v, list(self.theta.values())), strict=True))

    def _gradient(self, outputs: Tensor, u: Tensor, create_graph: bool = False, retain_graph: bool = True) -> Named:
        if not outputs.requires_grad:
            raise UnconnectedError(self.theta)
        theta = self.theta.values()
        found = torch.autograd.grad(
            outputs, list(theta), u, retain_graph=retain_graph, create_graph=create_graph, allow_unused=True
        )
        if all(gradient is None for gradient in found):
            raise UnconnectedError(self.theta)
        gradients = (torch.zeros_like(p) if g is None else g for p, g in zip(theta, found, strict=True))
        return dict(zip(self.theta, gradients, strict=True))


class ForwardMode(Derivatives):
    """Forward-mode differentiation with dual numbers: a product repeats the pass, tangents beside values.

    A product costs more than a traced one (`linearised`) by the pass it repeats, but there is nothing to trace.
    """

    batched = True

    def jvp(self, v: Mapping[str, Tensor]) -> Tensor:
        with FORWARD_MODE:
            tangent: Tensor = torch.func.jvp(self.f, (_detached(self.theta),), (dict(v),))[1]
        return tangent

    def second(self, w: Tensor) -> Callable[[Mapping[str, Tensor]], Named]:
        if self.precision.itemsize < 4:
            # Under autocast, tangents of a backward pass may be wider than its values, and no convolution takes both.
            return self._backward_twice(w)
        gradient = torch.func.grad(lambda theta: (self.f(theta) * w).sum())

        def product(v: Mapping[str, Tensor]) -> Named:
            with FORWARD_MODE:
                tangent: Named = torch.func.jvp(gradient, (_detached(self.theta),), (dict(v),))[1]
            return tangent

        return product


class DoubleBackward(Derivatives):
    """Reverse mode twice: `J v` is the derivative of `J^T u` in `u`, along `v`."""

    batched = True

    def __init__(
        self, f: Function, theta: Mapping[str, Tensor], precision: torch.dtype, given_away: bool = False
    ) -> None:
        super().__init__(f, theta, precision, given_away)
        self._u = torch.zeros_like(self.outputs, requires_grad=True)
        self._transposed: Named | None = None

    def jvp(self, v: Mapping[str, Tensor]) -> Tensor:
        if self._transposed is None:
            self._transposed = self._gradient(self._graph, self._u, create_graph=True)
        return _along(self._transposed, v, [self._u])[0]

    def second(self, w: Tensor) -> Callable[[Mapping[str, Tensor]], Named]:
        return self._backward_twice(w)


def _along(slopes: Named, v: Mapping[str, Tensor], inputs: list[Tensor]) -> Sequence[Tensor]:
    """The derivatives of `<slopes, v>` in the inputs."""
    used = {name: slope for name, slope in slopes.items() if slope.requires_grad}
    if not used:
        return [torch.zeros_like(one) for one in inputs]
    given = [v[name] for name in used]
    return torch.autograd.grad(list(used.values()), inputs, given, retain_graph=True, materialize_grads=True)


class FiniteDifferences(Derivatives):
    """Central differences along `v`: for kernels without forward mode or double backward, such as fused attention."""

    first_order = True

    def jvp(self, v: Mapping[str, Tensor]) -> Tensor:
        with torch.no_grad():
            h = self._step(v)
            return (self.f(self._moved(v, h)) - self.f(self._moved(v, -h))) / (2 * h).to(self.outputs.dtype)

    def second(self, w: Tensor) -> Callable[[Mapping[str, Tensor]], Named]:
        def product(v: Mapping[str, Tensor]) -> Named:
            h = self._step(v)
            return slope(self._vjp_at(self._moved(v, h), w), self._vjp_at(self._moved(v, -h), w), 2 * h)

        return product

    def _vjp_at(self, theta: Named, w: Tensor) -> Named:
        with torch.autograd.graph.disable_saved_tensors_hooks(RECOMPUTED):
            return type(self)(self.f, theta, self.precision, self.given_away).vjp(w)

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


class OneSidedDifferences(FiniteDifferences):
    """Differences between `theta + h v` and `theta`, where the outputs are known: one pass per product, less exact."""

    def jvp(self, v: Mapping[str, Tensor]) -> Tensor:
        with torch.no_grad():
            h = self._step(v)
            return (self.f(self._moved(v, h)) - self.outputs) / h.to(self.outputs.dtype)

    def second(self, w: Tensor) -> Callable[[Mapping[str, Tensor]], Named]:
        here = self.vjp(w)

        def product(v: Mapping[str, Tensor]) -> Named:
            h = self._step(v)
            return slope(self._vjp_at(self._moved(v, h), w), here, h)

        return product


def slope(ahead: Named, behind: Named, distance: Tensor) -> Named:
    """The difference quotient of two vectors."""
    return {name: (ahead[name] - behind[name]) / distance.to(ahead[name].dtype) for name in ahead}


def _detached(theta: Named) -> Named:
    return {name: parameter.detach() for name, parameter in theta.items()}

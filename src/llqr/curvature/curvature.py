"""The quadratic model at the current weights on one batch: loss, gradient `g`, and the product `v -> H v`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

import torch
from torch import Tensor

from llqr.curvature.derivatives import Derivatives, ForwardMode, Function
from llqr.curvature.divergence import Divergence, Scale, check_scale
from llqr.curvature.problem import Problem
from llqr.curvature.quadratic import Named, QuadraticModel


class Curvature:
    """`g` of the mean loss and `H v = scale * J^T Q J v` (plus the network's second derivatives for Newton).

    `derivatives` says how `J v` and `J^T u` are computed, and `given_away` whether the network is known to keep nothing
    for a second backward pass.
    """

    def __init__(
        self,
        problem: Problem,
        divergence: Divergence,
        derivatives: Callable[[Function, Mapping[str, Tensor], torch.dtype, bool], Derivatives],
        scale: Scale | None = None,
        *,
        given_away: bool = False,
    ) -> None:
        if problem.replaced and derivatives is ForwardMode:
            raise RuntimeError(
                f"model: it assigns to `.data` of {', '.join(problem.replaced)} when it is called, in which torch's "
                "forward mode may crash; write to them in place, or choose the engine 'double-backward'"
            )
        self._problem = problem
        self._derivatives = derivatives
        self._divergence = divergence
        self.given_away = given_away
        theta, inputs = problem.parameters, problem.pieces
        # One piece: linearise once and keep it. Several: linearise anew for every product, which bounds the memory.
        self._kept = self._linearise(inputs[0]) if len(inputs) == 1 else None
        with torch.no_grad():
            pieces = [self._kept.outputs] if self._kept else [problem.outputs(theta, piece) for piece in inputs]
        self._rows = [piece.shape[0] for piece in pieces] if len(pieces) > 1 else None
        outputs = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        with torch.enable_grad():
            z = outputs.detach().requires_grad_()
            loss = problem.loss(z)
            (self._slope,) = torch.autograd.grad(loss, z)
        self.loss = loss.detach()
        self.terms = problem.terms(outputs)
        self._q = divergence.output_hessian(problem.loss, outputs)
        self._scale = _resolve(divergence.scale if scale is None else scale, self.terms)
        self._second: Callable[[Mapping[str, Tensor]], Named] | None = None
        if divergence.second_order and self._kept:
            self._second = self._kept.second(self._scale * self._slope)

    def model(self, gradients: int = 1) -> QuadraticModel:
        """Loss, product, and the gradients of so many shares of the batch; only the model holds the gradients."""
        if gradients == 1:
            return QuadraticModel(self.loss, self.gradient(), self.product, terms=self.terms)
        shares = tuple(self._share(rows, gradients) for rows in self._shares(gradients))
        mean = {name: torch.stack([share[name] for share in shares]).mean(0) for name in shares[0]}
        batched = self._kept is not None and self._kept.batched
        return QuadraticModel(self.loss, mean, self.product, shares, self.terms, self.products if batched else None)

    def gradient(self) -> Named:
        """`g = J^T w`, with `w` the loss's slope in the outputs."""
        return self._pulled(self._slope)

    def _shares(self, count: int) -> list[slice]:
        """Consecutive rows of the outputs, as evenly as they can be divided."""
        rows = self._slope.shape[0] if self._slope.ndim else 1
        if rows < count:
            raise ValueError(f"gradients: {count} of them need an inner batch of as many samples, got {rows}")
        ends = [rows * k // count for k in range(count + 1)]
        return [slice(start, end) for start, end in pairwise(ends)]

    def _share(self, rows: slice, count: int) -> Named:
        """The gradient of some rows of the outputs, scaled so that the mean over all shares is `g`."""
        slope = torch.zeros_like(self._slope)
        slope[rows] = count * self._slope[rows]
        return self._pulled(slope)

    def _pulled(self, slope: Tensor) -> Named:
        """`J^T slope`."""
        walk = zip(self._linearised(), self._cut(slope), strict=True)
        gradient = self._sum(network.vjp(w) for network, w in walk)
        for name, part in gradient.items():
            if part.layout != torch.strided:
                raise TypeError(f"model: the gradient of parameter {name!r} is sparse, which a metric does not support")
        return gradient

    def product(self, v: Mapping[str, Tensor]) -> Named:
        """`H v`."""
        Jv = [network.jvp(v) for network in self._linearised()]
        u = torch.cat(Jv) if len(Jv) > 1 else Jv[0]
        # Scaled here, where the tensors are small, and not after they are pulled back to the parameters.
        pulled, slopes = self._cut(self._scale * self._q(u)), self._cut(self._scale * self._slope)
        walk = zip(self._linearised(), pulled, slopes, strict=True)
        return self._sum(self._pull(network, q, w, v) for network, q, w in walk)

    def products(self, v: Mapping[str, Tensor]) -> Named:
        """`H v` for vectors stacked along a new first dimension: one pass, with the memory of all of them."""
        try:
            products: Named = torch.vmap(self.product)(dict(v))
        except RuntimeError as error:
            if "vmap" not in str(error):
                raise
            # The network has an operation that cannot be batched, such as one that draws random numbers.
            each = [self.product(dict(zip(v, parts, strict=True))) for parts in zip(*v.values(), strict=True)]
            products = {name: torch.stack([Hv[name] for Hv in each]) for name in v}
        return products

    def asymmetry(self, gradient: Named) -> float:
        """`|<w, J g> - <J^T w, g>| / |g|^2` with `w` the loss's slope in the outputs: 0 for correct derivatives.

        Forward mode differentiates through `torch.no_grad` and straight-through tricks, which the backward pass treats
        as constant.
        """
        Jg = [network.jvp(gradient) for network in self._linearised()]
        pairs = zip(Jg, self._cut(self._slope), strict=True)
        along = sum(float((u.double() * w.double()).sum()) for u, w in pairs)
        square = _dot(gradient, gradient)
        return abs(along - square) / square if square else 0.0

    def skewness(self, gradient: Named, product: Named) -> float:
        """`|<Hg, Hg> - <g, H Hg>| / |g| |H Hg|` with `Hg` the product that is given: 0 for a symmetric `H`.

        The double backward pass of an operation may be wrong where its backward pass is right.
        """
        again = self.product(product)
        square, along = _dot(product, product), _dot(gradient, again)
        size = (_dot(gradient, gradient) * _dot(again, again)) ** 0.5
        return abs(square - along) / size if size else 0.0

    def _pull(self, network: Derivatives, q: Tensor, w: Tensor, v: Mapping[str, Tensor]) -> Named:
        pulled = network.vjp(q)
        if not self._divergence.second_order:
            return pulled
        second = (self._second or network.second(w))(v)
        return {name: pulled[name] + second[name] for name in pulled}

    def _linearised(self) -> Iterator[Derivatives]:
        pieces = self._problem.pieces
        for network in [self._kept] if self._kept is not None else map(self._linearise, pieces):
            yield network
            self.given_away |= network.given_away

    def _linearise(self, piece: object) -> Derivatives:
        problem = self._problem
        plain = not getattr(self._derivatives, "first_order", False)

        def f(theta: Mapping[str, Tensor]) -> Tensor:
            return problem.outputs(theta, piece, plain=plain)

        return self._derivatives(f, problem.parameters, problem.precision, self.given_away)

    def _cut(self, rows: Tensor) -> list[Tensor]:
        return [rows] if self._rows is None else list(rows.split(self._rows))

    def _sum(self, parts: Iterator[Named]) -> Named:
        total = next(parts)
        for part in parts:
            total = {name: total[name] + part[name] for name in total}
        return total


def _dot(a: Named, b: Named) -> float:
    return sum(float((part.double() * b[name].double()).sum()) for name, part in a.items())


def _resolve(scale: Scale, terms: Tensor) -> Tensor:
    check_scale(scale)
    if scale == "sum":
        return terms
    return torch.full_like(terms, 1.0 if scale == "mean" else float(scale))

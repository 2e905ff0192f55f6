"""The quadratic model at the current weights on one batch: loss, gradient `g`, and the product `v -> H v`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from llqr.curvature.divergence import Divergence, Scale, check_scale
from llqr.curvature.engines import AUTOMATIC, ENGINES, Engine, Named
from llqr.curvature.problem import Problem

#: An engine whose forward and backward derivatives disagree by more (relative) is not taken by "auto"; what float32 and
#: tf32 round stays below it, and coarser dtypes get more.
ASYMMETRY = 0.01


class Curvature:
    """`g` of the mean loss and `H v = scale * J^T Q J v` (plus the network's second derivatives for Newton).

    Attributes:
        loss: the mean loss on the batch.
        gradient: `g`, by parameter name.
    """

    def __init__(self, problem: Problem, divergence: Divergence, engine: type[Engine], scale: Scale | None = None):
        self._problem = problem
        self._engine = engine
        self._divergence = divergence
        # One piece: linearise once and keep it. Several: linearise anew for every product, which bounds the memory.
        self._kept = self._linearise(problem.pieces[0]) if len(problem.pieces) == 1 else None
        with torch.no_grad():
            pieces = [self._kept.outputs] if self._kept else [self._outputs(piece) for piece in problem.pieces]
        self._rows = [piece.shape[0] for piece in pieces] if len(pieces) > 1 else None
        outputs = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        with torch.enable_grad():
            z = outputs.detach().requires_grad_()
            loss = problem.loss(z)
            (self._slope,) = torch.autograd.grad(loss, z)
        self.loss = loss.detach()
        self.gradient = self._sum(e.vjp(w) for e, w in zip(self._linearised(), self._cut(self._slope), strict=True))
        for name, part in self.gradient.items():
            if part.layout != torch.strided:
                raise TypeError(f"model: the gradient of parameter {name!r} is sparse, which a metric does not support")
        self._q = divergence.output_hessian(problem.loss, outputs)
        self._scale = _resolve(divergence.scale if scale is None else scale, problem, outputs)
        self._second: Callable[[Mapping[str, Tensor]], Named] | None = None
        if divergence.second_order and self._kept:
            self._second = self._kept.second(self._scale * self._slope)

    def product(self, v: Mapping[str, Tensor]) -> Named:
        """`H v`."""
        moved = [engine.jvp(v) for engine in self._linearised()]
        u = torch.cat(moved) if len(moved) > 1 else moved[0]
        # Scaled here, where the tensors are small, and not after they are pulled back to the parameters.
        pulled, slopes = self._cut(self._scale * self._q(u)), self._cut(self._scale * self._slope)
        walk = zip(self._linearised(), pulled, slopes, strict=True)
        return self._sum(self._pull(engine, q, w, v) for engine, q, w in walk)

    def asymmetry(self) -> float:
        """`|<w, J g> - <J^T w, g>| / |g|^2` with `w` the loss's slope in the outputs: 0 for an engine that is right.

        Forward mode goes through `torch.no_grad` and straight-through tricks, which the backward pass holds constant.
        """
        moved = [engine.jvp(self.gradient) for engine in self._linearised()]
        pairs = zip(moved, self._cut(self._slope), strict=True)
        along = sum(float((u.double() * w.double()).sum()) for u, w in pairs)
        square = sum(float(part.double().square().sum()) for part in self.gradient.values())
        return abs(along - square) / square if square else 0.0

    def _pull(self, engine: Engine, q: Tensor, w: Tensor, v: Mapping[str, Tensor]) -> Named:
        pulled = engine.vjp(q)
        if not self._divergence.second_order:
            return pulled
        second = (self._second or engine.second(w))(v)
        return {name: pulled[name] + second[name] for name in pulled}

    def _linearised(self) -> Iterator[Engine]:
        if self._kept is not None:
            yield self._kept
        else:
            for piece in self._problem.pieces:
                yield self._linearise(piece)

    def _linearise(self, piece: object) -> Engine:
        problem = self._problem
        plain = not self._engine.first_order
        return self._engine(
            lambda theta: problem.outputs(theta, piece, plain=plain), problem.parameters, problem.precision
        )

    def _outputs(self, piece: object) -> Tensor:
        return self._problem.outputs(self._problem.parameters, piece)

    def _cut(self, rows: Tensor) -> list[Tensor]:
        return [rows] if self._rows is None else list(rows.split(self._rows))

    def _sum(self, parts: Iterator[Named]) -> Named:
        total = next(parts)
        for part in parts:
            total = {name: total[name] + part[name] for name in total}
        return total


def _resolve(scale: Scale, problem: Problem, outputs: Tensor) -> Tensor:
    check_scale(scale)
    if scale == "sum":
        return problem.terms(outputs)
    if scale == "mean":
        return torch.ones((), dtype=outputs.dtype, device=outputs.device)
    return torch.full((), float(scale), dtype=outputs.dtype, device=outputs.device)


def choose_engine(problem: Problem, divergence: Divergence, name: str = "auto") -> tuple[type[Engine], list[str]]:
    """The engine by name, or the first one this model supports, with what the ones before it said."""
    if name != "auto":
        return ENGINES[name], []
    refused = []
    tolerance = max(ASYMMETRY, torch.finfo(problem.precision).eps ** 0.5)
    for engine in (ENGINES[candidate] for candidate in AUTOMATIC):
        try:
            curvature = Curvature(problem, divergence, engine)
            curvature.product(curvature.gradient)
            if engine.name != AUTOMATIC[-1] and curvature.asymmetry() > tolerance:
                raise RuntimeError("its forward and backward derivatives of this model disagree")
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            raise  # a bad batch, which says nothing of the engine
        except (NotImplementedError, RuntimeError) as error:
            refused.append(f"{engine.name}: {str(error).splitlines()[0]}")
            cause = error
        else:
            return engine, refused
    raise RuntimeError("engine: no way to differentiate this model works. " + " | ".join(refused)) from cause

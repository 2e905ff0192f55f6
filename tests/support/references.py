"""Dense references on the flattened parameters, by reverse mode alone and entry by entry.

`torch.func.hessian` is avoided on purpose: it returns wrong numbers through LayerNorm.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dense_blocks import dense_blocks
from llqr.curvature import ENGINES, Curvature, Divergence, Problem, QuadraticModel
from llqr.metric import Factors, Metric

#: How near the products of each engine come to the dense ones.
DIFFERENCES = [name for name in ENGINES if not ENGINES[name].exact]
TOLERANCE = dict.fromkeys(ENGINES, 1e-10) | dict.fromkeys(DIFFERENCES, 1e-4)


def quadratic_model(
    problem: Problem, divergence: Divergence, engine: str, scale: str | float | None = None
) -> QuadraticModel:
    """The curvature of a problem by the name of an engine."""
    divergence = divergence if scale is None else replace(divergence, scale=scale)
    if engine == "linearised":
        from llqr.curvature.traced import Traces

        return Traces(divergence).linearise(problem)
    return Curvature(problem, divergence, ENGINES[engine]).model()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """`|actual - expected| / |expected|`, in float64."""
    actual, expected = actual.detach().double(), expected.detach().double()
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-300))


def trainable(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def flat(named: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([part.detach().reshape(-1) for part in named.values()])


def unflat(vector: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    parts = vector.split([part.numel() for part in like.values()])
    return {name: part.reshape(like[name].shape) for name, part in zip(like, parts, strict=True)}


def run(model: nn.Module, inputs: Any) -> Tensor:
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def jacobian(of: Tensor, wrt: list[Tensor]) -> Tensor:
    """Row by row: one backward pass an entry of `of`."""
    width = sum(part.numel() for part in wrt)
    rows = []
    for entry in of.reshape(-1):
        if not entry.requires_grad:
            rows.append(torch.zeros(width, dtype=of.dtype))
            continue
        row = torch.autograd.grad(entry, wrt, retain_graph=True, materialize_grads=True)
        rows.append(torch.cat([part.reshape(-1) for part in row]))
    return torch.stack(rows).detach()


def dense_gradient(model: nn.Module, loss_fn: Callable[..., Tensor], batch: tuple[Any, Any]) -> Tensor:
    loss = loss_fn(run(model, batch[0]), batch[1])
    parts = torch.autograd.grad(loss, list(trainable(model).values()), materialize_grads=True)
    return torch.cat([part.reshape(-1) for part in parts])


def dense_newton(model: nn.Module, loss_fn: Callable[..., Tensor], batch: tuple[Any, Any]) -> Tensor:
    """The Hessian of the mean loss."""
    wrt = list(trainable(model).values())
    loss = loss_fn(run(model, batch[0]), batch[1])
    slopes = torch.autograd.grad(loss, wrt, create_graph=True, materialize_grads=True)
    return jacobian(torch.cat([slope.reshape(-1) for slope in slopes]), wrt)


def dense_gauss_newton(model: nn.Module, loss_fn: Callable[..., Tensor], batch: tuple[Any, Any]) -> Tensor:
    """`J^T Q J` with `Q` the Hessian of the mean loss in the outputs."""
    outputs = run(model, batch[0])
    j = jacobian(outputs, list(trainable(model).values()))
    z = outputs.detach().requires_grad_()
    (slope,) = torch.autograd.grad(loss_fn(z, batch[1]), z, create_graph=True)
    return j.T @ jacobian(slope, [z]) @ j


def dense_fisher(model: nn.Module, inputs: Any, kept: Tensor | None = None) -> Tensor:
    """`sum_n J_n^T (diag p_n - p_n p_n^T) J_n` over all rows of logits, or over those in the mask `kept`."""
    outputs = run(model, inputs)
    classes = outputs.shape[-1]
    j = jacobian(outputs, list(trainable(model).values()))
    j = j.reshape(-1, classes, j.shape[1])
    p = outputs.detach().reshape(-1, classes).softmax(-1)
    rows = range(len(p)) if kept is None else kept.reshape(-1).nonzero().flatten().tolist()
    return sum(j[n].T @ (torch.diag(p[n]) - torch.outer(p[n], p[n])) @ j[n] for n in rows)


def dense_metric(metric: Metric, like: Mapping[str, Tensor], factors: list[Factors] | None = None) -> Tensor:
    """`U` written out on the flattened parameters, block by block; differentiable in the factors."""
    factors = metric.factors() if factors is None else factors
    size = sum(part.numel() for part in like.values())
    places = unflat(torch.arange(size), like)
    dense = torch.eye(size, dtype=next(iter(like.values())).dtype)
    for group, own in zip(metric.groups, factors, strict=True):
        for block, matrix in zip(group.blocks, dense_blocks(group, own), strict=True):
            at = block.piece(places[block.parameter]).reshape(-1)
            dense = dense.index_put((at.unsqueeze(1), at.unsqueeze(0)), matrix)
    return dense

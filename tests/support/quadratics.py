"""Quadratic models given as dense matrices, and what `J` and its derivatives are on them, by autograd."""

import torch

from llqr import Metric
from llqr.inner import SOLVERS, Objective
from llqr.inner import solve as solve_inner
from references import dense_metric, flat, trainable, unflat
from small_models import mlp


class Quadratic:
    """`g` and `H` written out."""

    def __init__(self, parameters, seed=0, definite=True):
        generator = torch.Generator().manual_seed(seed)
        size = sum(p.numel() for p in parameters.values())
        root = torch.randn(size, size, generator=generator, dtype=torch.float64)
        self.g = torch.randn(size, generator=generator, dtype=torch.float64)
        # Far from diagonal, but well enough conditioned for the solvers to be checked to many digits.
        self.h = root @ root.T / size + torch.eye(size, dtype=torch.float64) if definite else (root + root.T) / 2
        self.like = parameters
        self.loss = torch.tensor(0.0, dtype=torch.float64)
        self.gradient = unflat(self.g, parameters)
        self.products = 0

    def product(self, v):
        self.products += 1
        return unflat(self.h @ flat(v), self.like)

    def value(self, u, damping=0.0):
        """`J` of a dense `U`."""
        delta = -u @ self.g
        return self.g @ delta + 0.5 * delta @ self.h @ delta + 0.5 * damping * delta @ delta


def setting(kind, definite=True):
    model = mlp()
    parameters = {name: p.detach() for name, p in trainable(model).items()}
    return Metric(model, structure=kind), Quadratic(parameters, definite=definite)


def solve(metric, quadratic, inner, damping=0.0, precision=None):
    """The inner loop on a quadratic model that is given."""
    return solve_inner(Objective(metric, quadratic, damping, precision), inner, inner.lr)


def solver_for(metric, inner):
    """A solver at the metric's factors, as the inner loop makes it."""
    return SOLVERS[inner.solver](metric, inner, inner.lr)


def shaken(metric, seed=0):
    generator = torch.Generator().manual_seed(seed)
    factors = [
        {n: f + 0.3 * torch.randn(f.shape, generator=generator, dtype=f.dtype) for n, f in group.items()}
        for group in metric.factors()
    ]
    metric.assign(factors)
    return factors


def leaves_of(factors):
    return [{name: f.detach().clone().requires_grad_() for name, f in group.items()} for group in factors]


def slopes_of(metric, quadratic, factors, damping=0.0):
    """`J` and its gradient by autograd through the dense quadratic form."""
    leaves = leaves_of(factors)
    value = quadratic.value(dense_metric(metric, quadratic.like, leaves), damping)
    flat_leaves = [f for group in leaves for f in group.values()]
    gradients = iter(torch.autograd.grad(value, flat_leaves, materialize_grads=True))
    return value.detach(), [{name: next(gradients) for name in group} for group in leaves]

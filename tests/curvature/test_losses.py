"""`N` times the Hessian of the mean loss, with `N` the number of targets not ignored, for every kind of loss."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import llqr
from llqr.curvature import NEWTON, NGD, Problem, divergence_named
from references import (
    DIFFERENCES,
    TOLERANCE,
    dense_fisher,
    dense_gauss_newton,
    dense_newton,
    flat,
    quadratic_model,
    relative_error,
    trainable,
)
from small_models import mlp, tokens_loss

APPROXIMATE = [(engine, TOLERANCE[engine]) for engine in DIFFERENCES]
WEIGHTS = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
ROWS = 7


def inputs(*shape):
    return torch.randn(*(shape or (ROWS,)), 4, dtype=torch.float64)


def classes(*shape):
    return torch.randint(3, shape or (ROWS,))


def with_ignored(value, *shape):
    targets = classes(*shape)
    targets.view(-1)[1::3] = value
    return targets


class TokensLoss(nn.CrossEntropyLoss):
    """A module for `(B, T, V)` logits, with all of `nn.CrossEntropyLoss`'s options."""

    def forward(self, logits, targets):
        return super().forward(logits.flatten(0, -2), targets.flatten())


def _of_whole_numbers(logits, labels):
    return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))


# name -> (loss, batch, the number of terms the mean is over)
LOSSES = {
    "cross-entropy": lambda: (F.cross_entropy, (inputs(), classes()), ROWS),
    "tokens": lambda: (tokens_loss, (inputs(3, 5), classes(3, 5)), 15),
    "ignored by default": lambda: (F.cross_entropy, (inputs(), with_ignored(-100)), 5),
    "ignored by a module": lambda: (
        nn.CrossEntropyLoss(ignore_index=2),
        (inputs(), torch.tensor([2, 0, 1, 2, 1, 0, 0])),
        5,
    ),
    "ignored by a partial": lambda: (
        functools.partial(F.cross_entropy, ignore_index=-1),
        (inputs(), with_ignored(-1)),
        5,
    ),
    "ignored by a partial of a module": lambda: (
        functools.partial(nn.CrossEntropyLoss(ignore_index=-1)),
        (inputs(), with_ignored(-1)),
        5,
    ),
    "ignored tokens": lambda: (TokensLoss(ignore_index=-7), (inputs(3, 5), with_ignored(-7, 3, 5)), 10),
    "label smoothing": lambda: (nn.CrossEntropyLoss(label_smoothing=0.2), (inputs(), classes()), ROWS),
    "class weights": lambda: (nn.CrossEntropyLoss(weight=WEIGHTS), (inputs(), classes()), ROWS),
    "class weights, smoothed, ignored": lambda: (
        nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1, ignore_index=-1),
        (inputs(), with_ignored(-1)),
        5,
    ),
    "class probabilities": lambda: (F.cross_entropy, (inputs(), inputs().softmax(-1)[:, :3]), ROWS),
    "mean squared error": lambda: (F.mse_loss, (inputs(), torch.randn(ROWS, 3, dtype=torch.float64)), ROWS),
    "binary cross-entropy": lambda: (
        F.binary_cross_entropy_with_logits,
        (inputs(), torch.rand(ROWS, 3, dtype=torch.float64).round()),
        ROWS,
    ),
    "labels as whole numbers": lambda: (_of_whole_numbers, (inputs(), torch.randint(2, (ROWS, 3))), ROWS),
    "labels that are true or false": lambda: (_of_whole_numbers, (inputs(), torch.rand(ROWS, 3) > 0.5), ROWS),
    "huber": lambda: (F.huber_loss, (inputs(), 2 * torch.randn(ROWS, 3, dtype=torch.float64)), ROWS),
}


def product_of(model, loss_fn, batch, divergence, v, engine="double-backward", scale=None):
    with torch.no_grad():
        problem = Problem(model, loss_fn, batch, trainable(model))
        return flat(quadratic_model(problem, divergence, engine, scale).product(v))


def random_direction(model):
    return {name: torch.randn_like(p) for name, p in trainable(model).items()}


@pytest.mark.parametrize("loss", LOSSES)
def test_gauss_newton_is_summed_over_the_terms(loss):
    model = mlp()
    loss_fn, batch, terms = LOSSES[loss]()
    v = random_direction(model)
    expected = terms * dense_gauss_newton(model, loss_fn, batch) @ flat(v)
    for engine, tolerance in (("forward", 1e-10), ("double-backward", 1e-10), *APPROXIMATE):
        assert relative_error(product_of(model, loss_fn, batch, NGD, v, engine), expected) < tolerance


@pytest.mark.parametrize("loss", LOSSES)
def test_newton_is_the_hessian_of_the_mean_loss(loss):
    model = mlp()
    loss_fn, batch, _ = LOSSES[loss]()
    v = random_direction(model)
    expected = dense_newton(model, loss_fn, batch) @ flat(v)
    for engine, tolerance in (("double-backward", 1e-10), *APPROXIMATE):
        assert relative_error(product_of(model, loss_fn, batch, NEWTON, v, engine), expected) < tolerance


@pytest.mark.parametrize(
    "loss", ["cross-entropy", "tokens", "ignored tokens", "ignored by a module", "label smoothing"]
)
def test_unweighted_cross_entropy_gives_the_fisher_matrix(loss):
    model = mlp()
    loss_fn, batch, _ = LOSSES[loss]()
    ignored = getattr(loss_fn, "ignore_index", -100)
    v = random_direction(model)
    expected = dense_fisher(model, batch[0], batch[1] != ignored) @ flat(v)
    assert relative_error(product_of(model, loss_fn, batch, NGD, v), expected) < 1e-10


@pytest.mark.parametrize(("scale", "factor"), [(None, 5.0), ("sum", 5.0), ("mean", 1.0), (0.3, 0.3), (2, 2.0)])
@pytest.mark.parametrize("divergence", [NGD, NEWTON], ids=lambda d: d.name)
def test_curvature_scale(scale, factor, divergence):
    model = mlp()
    loss_fn, batch, _ = LOSSES["ignored by a module"]()
    if divergence is NEWTON and scale is None:
        factor = 1.0
    reference = dense_newton if divergence is NEWTON else dense_gauss_newton
    v = random_direction(model)
    expected = factor * reference(model, loss_fn, batch) @ flat(v)
    assert relative_error(product_of(model, loss_fn, batch, divergence, v, scale=scale), expected) < 1e-10


@pytest.mark.parametrize("scale", ["total", 0, -1.0, True, float("nan")])
def test_a_bad_curvature_scale_raises_a_clear_error(scale):
    model = mlp()
    with pytest.raises(ValueError, match="curvature_scale: expected 'sum', 'mean' or a positive number"):
        product_of(model, F.cross_entropy, (inputs(), classes()), NGD, random_direction(model), scale=scale)


def test_a_loss_linear_in_the_outputs_has_no_curvature():
    model = mlp()
    targets = torch.randn(ROWS, 3, dtype=torch.float64)
    v = random_direction(model)
    assert product_of(model, lambda z, t: (z * t).mean(), (inputs(), targets), NGD, v).count_nonzero() == 0
    assert product_of(model, F.l1_loss, (inputs(), targets), NGD, v).count_nonzero() == 0


# -- divergences of one's own ------------------------------------------------------------------------------------------


def renyi(z, z0, alpha):
    p, q = z.log_softmax(-1), z0.log_softmax(-1)
    return torch.logsumexp(alpha * q + (1 - alpha) * p, -1).mean() / (alpha - 1)


def kl(z, z0):
    p, q = z.log_softmax(-1), z0.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean()


DIVERGENCES = {
    "renyi of order 0.3": (functools.partial(renyi, alpha=0.3), 0.3),
    "renyi of order 2": (functools.partial(renyi, alpha=2.0), 2.0),
    "kl": (kl, 1.0),
    "reverse kl": (lambda z, z0: kl(z0, z), 1.0),
}


@pytest.mark.parametrize("engine", ["forward", "double-backward"])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_divergence_between_outputs(name, engine):
    """Renyi's Hessian at equality is alpha times Fisher's, and both directions of KL have Fisher's."""
    between, factor = DIVERGENCES[name]
    divergence = llqr.OutputDivergence(name, ema=0.95, scale="sum", between=between)
    model, x = mlp(), inputs()
    v = random_direction(model)
    expected = factor * dense_fisher(model, x) @ flat(v)
    # The loss is another one on purpose: the divergence does not look at it.
    targets = torch.randn(ROWS, 3, dtype=torch.float64)
    assert relative_error(product_of(model, F.mse_loss, (x, targets), divergence, v, engine), expected) < 1e-10


def test_divergences_by_name():
    assert divergence_named("ngd") is NGD
    assert divergence_named(NEWTON) is NEWTON
    with pytest.raises(ValueError, match="divergence: unknown 'fisher'; choose one of newton, ngd"):
        divergence_named("fisher")
    batch = inputs(), torch.zeros(ROWS, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="between"):
        product_of(mlp(), F.mse_loss, batch, llqr.OutputDivergence("x", 0.9, "sum"), {})


def test_a_loss_may_differentiate_by_itself():
    def penalised(outputs, targets):
        loss = F.cross_entropy(outputs, targets)
        return loss + torch.autograd.grad(loss, outputs, create_graph=True)[0].square().sum()

    geometry = llqr.Geometry(nn.Linear(4, 3), penalised, structure="scalar", inner=llqr.Inner(steps=1))
    assert geometry.refresh((torch.randn(8, 4), torch.randint(3, (8,)))).accepted

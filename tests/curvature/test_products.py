"""Every engine's `H v` against dense float64 references, on one network of every kind."""

import functools

import pytest
import torch

from llqr.curvature import NEWTON, NGD, Problem, frozen
from references import (
    DIFFERENCES,
    TOLERANCE,
    dense_fisher,
    dense_gauss_newton,
    dense_gradient,
    dense_newton,
    flat,
    quadratic_model,
    relative_error,
    trainable,
)
from small_models import case

MODELS = ["mlp", "batch-norm-cnn", "vit", "vit-fused", "translator"]


@functools.cache
def dense(name, divergence):
    drawn = case(name)
    drawn.model.eval()
    if divergence == "ngd":
        return dense_fisher(drawn.model, drawn.batch[0])
    return dense_newton(drawn.model, drawn.loss_fn, drawn.batch)


# Tracing takes many seconds: that of second derivatives on all but the smallest networks, any on the largest. Of two
# transformers that differ in a projection, one is traced.
COMBINATIONS = [
    pytest.param(
        name,
        engine,
        divergence,
        id=f"{name}-{engine}-{divergence.name}",
        marks=[pytest.mark.slow] if (name, engine) == ("translator", "linearised") else [],
    )
    for name in MODELS
    for engine in TOLERANCE
    for divergence in (NGD, NEWTON)
    if engine != "linearised" or name in ("mlp", "batch-norm-cnn") or (divergence is NGD and name != "vit")
]


@pytest.mark.parametrize(("name", "engine", "divergence"), COMBINATIONS)
def test_products_equal_the_dense_reference(name, engine, divergence):
    drawn, h = case(name), dense(name, divergence.name)
    parameters = trainable(drawn.model)
    with frozen(drawn.model, torch.device("cpu")), torch.no_grad():
        problem = Problem(drawn.model, drawn.loss_fn, drawn.batch, parameters)
        curvature = quadratic_model(problem, divergence, engine)
        for _ in range(2):
            v = {key: torch.randn_like(p) for key, p in parameters.items()}
            assert relative_error(flat(curvature.product(v)), h @ flat(v)) < TOLERANCE[engine]
    drawn.model.eval()
    assert relative_error(flat(curvature.gradient), dense_gradient(drawn.model, drawn.loss_fn, drawn.batch)) < 1e-12


@pytest.mark.parametrize(
    ("engine", "passes"),
    [("forward", 2), ("double-backward", 2), ("finite-differences", 3), ("one-sided-differences", 3)],
)
def test_a_product_in_pieces_runs_no_pass_for_nothing(engine, passes):
    """One pass of every piece for the way back, and what `J v` takes."""
    drawn = case("mlp")
    parameters, calls = trainable(drawn.model), []
    drawn.model.register_forward_hook(lambda *_: calls.append(1))
    with frozen(drawn.model, torch.device("cpu")), torch.no_grad():
        problem = Problem(drawn.model, drawn.loss_fn, drawn.batch, parameters, micro_batch=2)
        curvature = quadratic_model(problem, NGD, engine)
        calls.clear()
        curvature.product(curvature.gradient)
    assert len(problem.pieces) > 1
    assert len(calls) == passes * len(problem.pieces)


@pytest.mark.parametrize("name", ["mlp", "translator"])
def test_the_summed_gauss_newton_matrix_is_the_fisher_matrix(name):
    """Two ways to the same reference: `N J^T Q J` by autograd, and the softmax covariance written out."""
    drawn = case(name)
    terms = drawn.batch[1].numel()
    summed = terms * dense_gauss_newton(drawn.model, drawn.loss_fn, drawn.batch)
    assert relative_error(summed, dense_fisher(drawn.model, drawn.batch[0])) < 1e-12


@pytest.mark.parametrize("engine", ["linearised", *DIFFERENCES])
def test_fused_attention(engine):
    """torch's fused kernel, which has no second derivative, against the same network spelled out."""
    drawn, spelled_out = case("vit-kernel"), case("vit-fused")
    parameters = trainable(drawn.model)
    with frozen(drawn.model, torch.device("cpu")), torch.no_grad():
        problem = Problem(drawn.model, drawn.loss_fn, drawn.batch, parameters)
        curvature = quadratic_model(problem, NGD, engine)
        v = {key: torch.randn_like(p) for key, p in parameters.items()}
        product = flat(curvature.product(v))
    spelled_out.model.eval()
    assert relative_error(product, dense_fisher(spelled_out.model, drawn.batch[0]) @ flat(v)) < TOLERANCE[engine]


@pytest.mark.parametrize("divergence", [NGD, NEWTON], ids=lambda d: d.name)
@pytest.mark.parametrize("dtype", ["autocast", "parameters"])
@pytest.mark.parametrize("engine", DIFFERENCES)
def test_finite_differences_rise_above_the_rounding_of_bfloat16(engine, dtype, divergence):
    """A step fit for float32 outputs would be lost in the noise of a network that computes in bfloat16."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 10))
    x, y = torch.randn(64, 32), torch.randint(10, (64,))
    loss_fn = torch.nn.functional.cross_entropy
    with torch.no_grad():
        problem = Problem(model, loss_fn, (x, y), trainable(model))
        exact = quadratic_model(problem, divergence, "double-backward")
        v = exact.gradient
        expected = flat(exact.product(v))
        autocast = torch.bfloat16 if dtype == "autocast" else None
        if autocast is None:
            model, x, v = model.bfloat16(), x.bfloat16(), {name: part.bfloat16() for name, part in v.items()}
        problem = Problem(model, loss_fn, (x, y), trainable(model), autocast=autocast)
        product = flat(quadratic_model(problem, divergence, engine).product(v))
    # A step fit for float32 errs by 0.13 and more, and by 0.66 for Newton.
    assert relative_error(product, expected) < (0.02 if divergence is NGD else 0.1)

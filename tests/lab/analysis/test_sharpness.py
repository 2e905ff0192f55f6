"""Sharpness by Lanczos against dense eigenvalues, in float64, with and without a metric."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from llqr import Metric
from llqr.lab.analysis.sharpness import LossSurface, NotPositive, measure, symmetric_part, top_eigenvalue
from references import dense_metric, dense_newton, trainable
from small_models import batch_norm_cnn, case, mlp

EXACT = {"steps": 500, "tolerance": 1e-7}
STRUCTURES = ["scalar", "diagonal", "diag-kfac", "kfac", "kfac-psd", "e-kfac", "e-kfac-psd", "dense"]


def batch_for_mlp():
    return torch.randn(12, 4, dtype=torch.float64), torch.randint(3, (12,))


def perturbed(metric, amount=0.1):
    """Every factor moved away from the identity, without any symmetry left in it."""
    metric.assign([{name: f + amount * torch.randn_like(f) for name, f in group.items()} for group in metric.factors()])
    return metric


def square_root(matrix):
    values, vectors = torch.linalg.eigh(matrix)
    assert values[0] > 0
    return (vectors * values.sqrt()) @ vectors.T


def test_the_top_eigenvalue_is_that_of_the_dense_hessian():
    model, batch = mlp(), batch_for_mlp()
    found = measure(LossSurface(model, F.cross_entropy, batch), **EXACT)
    hessian = dense_newton(model, F.cross_entropy, batch)
    assert found.top.value == pytest.approx(torch.linalg.eigvalsh(hessian)[-1].item(), rel=1e-6)
    assert found.perceived == found.top


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_perceived_sharpness_is_that_of_the_dense_product(structure):
    """For every structure; where U is not symmetric, that of its symmetric part."""
    model, batch = mlp(), batch_for_mlp()
    metric = perturbed(Metric(model, structure=structure))
    surface = LossSurface(model, F.cross_entropy, batch)
    found = measure(surface, metric, **EXACT)
    u, h = dense_metric(metric, trainable(model)), dense_newton(model, F.cross_entropy, batch)
    assert (structure == "kfac") == (not torch.allclose(u, u.T))
    symmetric = (u + u.T) / 2
    root = square_root(symmetric)
    expected = torch.linalg.eigvalsh(root @ h @ root)[-1].item()
    assert found.perceived.value == pytest.approx(expected, rel=1e-6)
    assert abs(expected / found.top.value - 1) > 1e-3
    v = torch.randn_like(surface.weights)
    torch.testing.assert_close(symmetric_part(surface, metric, v), symmetric @ v)


def test_batch_norm_runs_in_eval_mode_and_nothing_of_the_model_changes():
    model = batch_norm_cnn().train()
    batch = torch.randn(6, 1, 5, 5, dtype=torch.float64), torch.randint(3, (6,))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = measure(LossSurface(model, F.cross_entropy, batch), **EXACT)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    hessian = dense_newton(model.eval(), F.cross_entropy, batch)
    assert found.top.value == pytest.approx(torch.linalg.eigvalsh(hessian)[-1].item(), rel=1e-6)


def test_in_pieces_it_is_the_same_hessian():
    model, batch = mlp(), batch_for_mlp()
    whole = LossSurface(model, F.cross_entropy, batch)
    pieces = LossSurface(model, F.cross_entropy, batch, piece=5)
    v = torch.randn_like(whole.weights)
    torch.testing.assert_close(pieces.hessian(v), whole.hessian(v))
    assert pieces.loss() == pytest.approx(whole.loss(), rel=1e-12)
    assert (whole.engine, pieces.engine) == ("double-backward", "double-backward")


class _OnceOnly(torch.autograd.Function):
    """The identity, without a second derivative."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return gradient


class OnceOnly(nn.Module):
    def forward(self, x):
        return _OnceOnly.apply(x)


def test_a_kernel_without_second_derivative_is_measured_by_differences():
    plain, batch = mlp(), batch_for_mlp()
    model = nn.Sequential(plain[0], OnceOnly(), plain[1], plain[2])
    surface = LossSurface(model, F.cross_entropy, batch)
    found = measure(surface, **EXACT)
    assert surface.engine == "finite-differences"
    expected = torch.linalg.eigvalsh(dense_newton(plain, F.cross_entropy, batch))[-1].item()
    assert found.top.value == pytest.approx(expected, rel=1e-5)


def test_other_inputs_than_one_tensor():
    example = case("translator")
    surface = LossSurface(example.model, example.loss_fn, example.batch)
    expected = torch.linalg.eigvalsh(dense_newton(example.model, example.loss_fn, example.batch))[-1].item()
    assert measure(surface, **EXACT).top.value == pytest.approx(expected, rel=1e-6)


def test_a_metric_that_is_not_positive_is_refused_with_a_reason():
    model, batch = mlp(), batch_for_mlp()
    metric = Metric(model, structure="diagonal")
    metric.assign([{name: -f for name, f in group.items()} for group in metric.factors()])
    found = measure(LossSurface(model, F.cross_entropy, batch), metric)
    assert found.perceived is None
    assert "U is not positive" in found.reason
    with pytest.raises(NotPositive):
        top_eigenvalue(lambda v: v, torch.ones(3), u=lambda v: -v)


def test_one_negative_eigenvalue_of_the_metric_is_found():
    model, batch = mlp(), batch_for_mlp()
    metric = Metric(model, structure="diagonal")
    (own,) = metric.factors()
    own["diagonal"][7] = -0.01
    metric.assign([own])
    assert measure(LossSurface(model, F.cross_entropy, batch), metric).perceived is None


def test_a_metric_not_learned_yet_is_the_identity():
    model, batch = mlp(), batch_for_mlp()
    found = measure(LossSurface(model, F.cross_entropy, batch), Metric(model, structure="kfac"))
    assert found.perceived == found.top


@pytest.mark.parametrize("values", [[3.0, 3.0, 3.0, 1.0], [-5.0, -2.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0], [-4.0, -3.0]])
def test_multiple_negative_and_vanishing_eigenvalues(values):
    """The largest, not the largest in size; and an exhausted space ends the iteration."""
    matrix = torch.diag(torch.tensor(values, dtype=torch.float64))
    found = top_eigenvalue(lambda v: matrix @ v, torch.randn(len(values), dtype=torch.float64), **EXACT)
    assert found.value == pytest.approx(max(values), abs=1e-9)
    assert found.steps <= len(values)


def test_the_error_bound_holds_when_it_stops_early():
    a = torch.randn(60, 60, dtype=torch.float64)
    matrix = a + a.T
    values = torch.linalg.eigvalsh(matrix)
    found = top_eigenvalue(lambda v: matrix @ v, torch.randn(60, dtype=torch.float64), steps=12, tolerance=1e-12)
    assert found.steps == 12
    assert 1e-9 < (values - found.value).abs().min().item() <= found.error


def test_a_start_of_zeros_is_refused():
    with pytest.raises(ValueError, match="start"):
        top_eigenvalue(lambda v: v, torch.zeros(3))

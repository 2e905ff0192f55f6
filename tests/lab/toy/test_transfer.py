"""Convergence transfer under a bounded, changing metric."""

import numpy as np
import pytest
import torch

from llqr.lab.toy.transfer import OscillatingMetric, RobustRegression, Transfer, transfer


@pytest.mark.slow
@pytest.mark.parametrize("power", [0.5, 0.25])
@pytest.mark.parametrize("batch", [None, 32])
def test_the_running_mean_falls_at_least_as_fast_as_the_inverse_root(power, batch):
    run = transfer(steps=2000, power=power, batch=batch)
    assert run.slope() <= -0.5


def test_a_radius_that_does_not_decay_leaves_a_floor():
    # This is why the radius decays: with a large constant radius and full gradients the mean stops falling.
    decaying = transfer(steps=800, rho=1.0, power=0.5)
    constant = transfer(steps=800, rho=1.0, power=0.0)
    assert constant.stationarity[-200:].mean() > 10 * decaying.stationarity[-200:].mean()


def test_the_metric_changes_inside_its_bounds():
    metric = OscillatingMetric(6)
    seen = []
    for metric.step in range(0, 4000, 50):
        basis = torch.eye(6, dtype=torch.float64)
        U = torch.stack([metric.apply(column) for column in basis])
        seen.append(torch.linalg.eigvalsh(U))
    seen = torch.stack(seen)
    assert 0.2499 < float(seen.min()) < 0.3
    assert 3.5 < float(seen.max()) < 4.001


def test_the_problem_is_not_convex():
    problem = RobustRegression.random(samples=64, dim=3)
    theta = torch.randn(3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    hessian = torch.func.hessian(problem.loss)
    assert float(torch.linalg.eigvalsh(hessian(10 * theta))[0]) < 0


def test_slopes_are_fitted_correctly():
    T = np.arange(1, 5001)
    assert Transfer(np.ones(5000)).slope() == pytest.approx(0, abs=1e-12)
    assert Transfer(0.5 * T**-0.5).slope() == pytest.approx(-0.5, abs=0.02)

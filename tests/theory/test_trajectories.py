"""The real optimizers, run row by row, against the closed recursions."""

import numpy as np
import pytest
import torch

from llqr.theory import METHODS, TwoScale, iterate, roll, simulate, stationary_variance


def quadratic(model):
    H = torch.from_numpy(model.H)
    U = torch.from_numpy(model.U)
    return lambda e: 0.5 * ((e @ H) * e).sum(-1), lambda gradient: gradient @ U


def random_model(dim, commuting, rows=3):
    rng = np.random.default_rng(dim)
    Q, W = (np.linalg.qr(rng.standard_normal((dim, dim)))[0] for _ in range(2))
    H_bar = (Q * rng.uniform(0.2, 3.0, dim)) @ Q.T
    basis = Q if commuting else W
    H_eps = (basis * rng.uniform(0.0, 8.0, dim)) @ basis.T
    return TwoScale(H_bar, H_eps), rng.standard_normal((rows, dim))


@pytest.mark.parametrize("dim", [1, 2, 10, 50])
@pytest.mark.parametrize("commuting", [True, False])
def test_llqr_sam_equals_the_exact_recursion(dim, commuting):
    model, e = random_model(dim, commuting)
    loss, metric = quadratic(model)
    eta, rho = 1.2 / model.mu[-1], 0.3
    run = simulate("llqr+sam", loss, torch.from_numpy(e), lr=eta, rho=rho, steps=150, metric=metric)
    points = run.positions.numpy()
    scale = np.abs(points).max()
    # Step by step from the optimizer's own points, and over the whole trajectory.
    assert np.abs(model.step(points[:-1], eta, rho) - points[1:]).max() <= 1e-12 * scale
    assert np.abs(model.trajectory(e, eta, rho, 150) - points).max() <= 1e-12 * scale
    whitened = roll(lambda y: model.whitened_step(y, eta, rho), e @ model.whitening, 150) @ model.unwhitening
    assert np.abs(whitened - points).max() <= 1e-12 * scale


@pytest.mark.parametrize("eta_mu", [0.05, 0.3, 0.8, 1.9])
def test_every_step_is_exact_at_any_learning_rate(eta_mu):
    model, e = random_model(20, False)
    loss, metric = quadratic(model)
    eta = eta_mu / model.mu[-1]
    points = simulate("llqr+sam", loss, torch.from_numpy(e), lr=eta, rho=0.3, steps=100, metric=metric).positions
    points = points.numpy()
    assert np.abs(model.step(points[:-1], eta, 0.3) - points[1:]).max() <= 1e-12


def test_sam_llqr_and_sgd_equal_their_recursions():
    model, e = random_model(6, False)
    loss, metric = quadratic(model)
    H, U, eta, rho = model.H, model.U, 0.05, 0.2
    start = torch.from_numpy(e)

    def sam(p):
        g = p @ H
        return p - eta * (p + rho * g / np.linalg.norm(g, axis=-1, keepdims=True)) @ H

    expected = {"sgd": lambda p: p - eta * p @ H, "llqr": lambda p: p - eta * p @ H @ U, "sam": sam}
    for method, step in expected.items():
        run = simulate(method, loss, start, lr=eta, rho=rho, steps=50, metric=metric)
        np.testing.assert_allclose(run.positions.numpy(), roll(step, e, 50), atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_rows_are_independent_of_each_other(method):
    model, e = random_model(3, False, rows=4)
    loss, metric = quadratic(model)
    rho = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    together = simulate(method, loss, torch.from_numpy(e), lr=0.05, rho=rho, steps=20, metric=metric).positions
    for row in range(4):
        alone = simulate(
            method, loss, torch.from_numpy(e[row : row + 1]), lr=0.05, rho=float(rho[row]), steps=20, metric=metric
        ).positions
        torch.testing.assert_close(together[:, row], alone[:, 0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_noise_enters_the_update_before_transport_and_never_the_probe(method):
    model, e = random_model(3, False)
    loss, metric = quadratic(model)
    noise = torch.randn(1, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    options = {"lr": 0.05, "rho": 0.2, "steps": 1, "metric": metric}
    quiet = simulate(method, loss, torch.from_numpy(e), **options).positions[1]
    noisy = simulate(method, loss, torch.from_numpy(e), **options, noise=lambda step: noise[step]).positions[1]
    moved = noise[0] @ torch.from_numpy(model.U) if "llqr" in method else noise[0]
    torch.testing.assert_close(noisy, quiet - 0.05 * moved, rtol=1e-12, atol=1e-12)


def test_llqr_with_noise_has_the_stationary_variance_of_the_proposition():
    lam, d, eta, tau = 2.0, 1.5, 0.4, 0.3
    generator = torch.Generator().manual_seed(0)
    run = simulate(
        "llqr",
        lambda z: 0.5 * lam * z.squeeze(-1) ** 2,
        torch.zeros(20000, 1, dtype=torch.float64),
        lr=eta,
        steps=60,
        metric=lambda gradient: gradient / d,
        noise=lambda step: tau * torch.randn(20000, 1, generator=generator, dtype=torch.float64),
    )
    # 20 points after the transient (q^40 < 1e-12), 20000 chains: a standard error below 0.5%.
    measured = float((run.positions[40:] ** 2).mean())
    assert measured == pytest.approx(float(stationary_variance(eta, lam, d, tau)), rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_that_sits_on_a_minimum_stays_there(dtype):
    start = torch.zeros(2, 1, dtype=dtype)
    assert simulate("sam", lambda z: z.square().sum(-1), start, lr=0.1, rho=0.1, steps=2).positions[-1].equal(start)


def test_points_that_are_kept_stay_as_they_were():
    model, e = random_model(3, False)
    loss, metric = quadratic(model)
    options = {"lr": 0.05, "rho": 0.2, "steps": 5, "metric": metric}
    points = list(iterate("llqr+sam", loss, torch.from_numpy(e), **options))
    assert torch.stack(points).equal(simulate("llqr+sam", loss, torch.from_numpy(e), **options).positions[1:])


def test_first_entry_and_path_length():
    run = simulate("sgd", lambda p: p.sum(-1), torch.zeros(1, 2, dtype=torch.float64), lr=1.0, steps=5)
    assert run.positions[-1].tolist() == [[-5.0, -5.0]]
    assert run.first(lambda p: p[:, 0] <= -3).tolist() == [3]
    assert run.first(lambda p: p[:, 0] > 1).tolist() == [-1]
    assert float(run.path_length()) == pytest.approx(5 * 2**0.5)
    assert float(run.path_length(torch.tensor([3]))) == pytest.approx(3 * 2**0.5)
    assert float(run.path_length(torch.tensor([-1]))) == pytest.approx(5 * 2**0.5)


def test_bad_arguments_are_named():
    start = torch.ones(1, 1, dtype=torch.float64)
    loss = lambda z: z.squeeze(-1) ** 2  # noqa: E731
    with pytest.raises(ValueError, match="method must be one of"):
        simulate("adam", loss, start, lr=0.1, steps=1)
    with pytest.raises(ValueError, match="rho must be positive"):
        simulate("sam", loss, start, lr=0.1, steps=1)
    with pytest.raises(ValueError, match="rho must be positive"):
        simulate("sam", loss, start, lr=0.1, steps=1, rho=torch.tensor([0.0]))
    with pytest.raises(ValueError, match="metric must be given"):
        simulate("llqr", loss, start, lr=0.1, steps=1)
    with pytest.raises(ValueError, match=r"start must have the shape \(rows, dim\), got \(3,\)"):
        simulate("sam", torch.square, torch.ones(3, dtype=torch.float64), lr=0.1, steps=1, rho=0.1)

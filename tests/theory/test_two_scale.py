"""The exact recursions against one another, against a naive transcription of the paper, and their arguments."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llqr.theory import TwoScale, perceived_sharpness, roll, scalar_step


def pair(dim, commuting, seed):
    """An SPD and a PSD matrix; the second has half the rank."""
    rng = np.random.default_rng(seed)
    Q, W = (np.linalg.qr(rng.standard_normal((dim, dim)))[0] for _ in range(2))
    bar = rng.uniform(0.2, 3.0, dim)
    eps = np.where(np.arange(dim) < (dim + 1) // 2, rng.uniform(0.5, 10.0, dim), 0.0)
    H_bar = (Q * bar) @ Q.T
    H_eps = (Q * eps) @ Q.T if commuting else (W * eps) @ W.T
    return H_bar, H_eps, rng.standard_normal(dim)


def paper_step(H_bar, H_eps, e, eta, rho):
    """Equation (dyn), transcribed literally."""
    H, U, identity = H_bar + H_eps, np.linalg.inv(H_bar), np.eye(len(e))
    norm = np.sqrt((H @ e) @ U @ (H @ e))
    return (identity - eta * U @ H) @ e - eta * rho / norm * U @ H @ U @ H @ e


@given(dim=st.integers(1, 50), commuting=st.booleans(), seed=st.integers(0, 10**6))
def test_the_three_recursions_agree(dim, commuting, seed):
    H_bar, H_eps, e = pair(dim, commuting, seed)
    model = TwoScale(H_bar, H_eps)
    eta, rho = 0.7 / model.mu[-1], 0.3
    for _ in range(40):
        expected = paper_step(H_bar, H_eps, e, eta, rho)
        scale = max(1.0, np.abs(e).max())
        assert np.abs(model.step(e, eta, rho) - expected).max() <= 1e-12 * scale
        whitened = model.unwhitening @ model.whitened_step(model.whitening @ e, eta, rho)
        assert np.abs(whitened - expected).max() <= 1e-12 * scale
        if commuting:
            V = model.eigenbasis[2]
            assert np.abs(V @ model.coordinate_step(V.T @ e, eta, rho) - expected).max() <= 1e-12 * scale
        e = expected


@pytest.mark.parametrize("dim", [1, 2, 7, 50])
@pytest.mark.parametrize("commuting", [True, False])
def test_whole_trajectories_agree_where_the_map_does_not_amplify_rounding(dim, commuting):
    # For smaller rates the map itself is sensitive in high dimension: starts 1e-15 apart separate just as fast.
    H_bar, H_eps, e = pair(dim, commuting, dim)
    model = TwoScale(H_bar, H_eps)
    eta, rho = 1.2 / model.mu[-1], 0.3
    exact = model.trajectory(e, eta, rho, 200)
    whitened = roll(lambda y: model.whitened_step(y, eta, rho), model.whitening @ e, 200) @ model.unwhitening
    assert np.abs(exact - whitened).max() <= 1e-12 * np.abs(exact).max()


@given(dim=st.integers(1, 12), commuting=st.booleans(), seed=st.integers(0, 10**6))
def test_perceived_sharpness(dim, commuting, seed):
    H_bar, H_eps, _ = pair(dim, commuting, seed)
    model = TwoScale(H_bar, H_eps)
    generalised = np.sort(np.linalg.eigvals(np.linalg.solve(H_bar, H_bar + H_eps)).real)
    np.testing.assert_allclose(model.mu, generalised, rtol=1e-9)
    assert (model.mu >= 1 - 1e-12).all()
    assert model.commuting == (commuting or dim == 1)
    if model.commuting:
        lambda_bar, lambda_eps, V = model.eigenbasis
        np.testing.assert_allclose(perceived_sharpness(lambda_bar, lambda_eps.clip(0)), model.mu, rtol=1e-9)
        np.testing.assert_allclose(V @ np.diag(lambda_bar) @ V.T, H_bar, atol=1e-9)
        np.testing.assert_allclose(V @ np.diag(lambda_eps) @ V.T, H_eps, atol=1e-9)


def test_the_eigenbasis_is_right_for_repeated_sharpness():
    # mu = 3 twice with different lambda_bar: the eigenspace of A alone does not fix the directions.
    Q = np.linalg.qr(np.random.default_rng(0).standard_normal((3, 3)))[0]
    H_bar, H_eps = Q @ np.diag([1.0, 2.0, 5.0]) @ Q.T, Q @ np.diag([2.0, 4.0, 0.0]) @ Q.T
    lambda_bar, lambda_eps, V = TwoScale(H_bar, H_eps).eigenbasis
    np.testing.assert_allclose(V @ np.diag(lambda_bar) @ V.T, H_bar, atol=1e-12)
    np.testing.assert_allclose(V @ np.diag(lambda_eps) @ V.T, H_eps, atol=1e-12)


def test_the_eigenbasis_is_right_for_sharpnesses_that_differ_little_beside_the_largest():
    # 1 + 1e-6 and 1 beside 1e6: rounding mixes their eigenvectors of A.
    Q = np.linalg.qr(np.random.default_rng(0).standard_normal((4, 4)))[0]
    H_bar, H_eps = (Q @ np.diag(values) @ Q.T for values in ([0.25, 2.0, 1.0, 0.5], [0.0, 2e-6, 1e6, 0.0]))
    lambda_bar, _, V = TwoScale(H_bar, H_eps).eigenbasis
    np.testing.assert_allclose(V @ np.diag(lambda_bar) @ V.T, H_bar, atol=1e-12)


def test_one_direction_is_the_scalar_map():
    model = TwoScale([0.3, 2.0], [4.0, 0.0])
    e = np.array([0.7, 0.0])
    for _ in range(30):
        following = model.step(e, 0.05, 0.2)
        assert following[0] == pytest.approx(float(scalar_step(e[0], 0.05, 0.2, 0.3, 4.0)), abs=1e-14)
        e = following


def test_the_minimum_is_a_fixed_point():
    assert (TwoScale([0.3, 2.0], [4.0, 0.0]).step(np.zeros(2), 0.05, 0.2) == 0).all()


def test_rows_are_independent():
    H_bar, H_eps, _ = pair(4, False, 3)
    model, e = TwoScale(H_bar, H_eps), np.random.default_rng(1).standard_normal((5, 4))
    np.testing.assert_allclose(model.step(e, 0.05, 0.1), [model.step(row, 0.05, 0.1) for row in e], atol=1e-14)


@pytest.mark.parametrize(
    ("H_bar", "H_eps", "message"),
    [
        ([1.0, 0.0], [1.0, 1.0], "H_bar must be positive definite"),
        ([1.0, 1.0], [-1.0, 1.0], "H_eps must be positive semi-definite"),
        (1e-12, -1e-11, "H_eps must be positive semi-definite"),
        ([[1.0, 0.5], [0.0, 1.0]], [1.0, 1.0], "H_bar must be symmetric"),
        ([1.0, 1.0], [1.0], "one shape"),
        ([[1.0, 2.0, 3.0]], [1.0], "H_bar must be a number"),
        ([np.nan], [1.0], "H_bar must be finite"),
    ],
)
def test_bad_matrices_are_named(H_bar, H_eps, message):
    with pytest.raises(ValueError, match=message):
        TwoScale(H_bar, H_eps)


def test_bad_numbers_are_named():
    model = TwoScale(1.0, 2.0)
    with pytest.raises(ValueError, match="rho must be positive"):
        model.step([1.0], 0.1, 0.0)
    with pytest.raises(ValueError, match="eta must be positive"):
        model.whitened_step([1.0], -0.1, 1.0)
    with pytest.raises(ValueError, match="1 entries"):
        model.step([1.0, 2.0], 0.1, 1.0)
    with pytest.raises(ValueError, match="do not commute"):
        TwoScale(*pair(3, False, 0)[:2]).coordinate_step([1.0, 0, 0], 0.1, 1.0)

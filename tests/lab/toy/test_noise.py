"""Stationary variance and one-step motion of a noisy mode."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llqr.lab.toy.noise import simulate_mode
from llqr.theory import one_step_motion, stationary_variance


@pytest.mark.parametrize("d", [0.3, 0.5, 1.0, 4.0])
def test_closed_forms_within_one_percent_at_a_million_steps(d):
    mode = simulate_mode(0.5, 1.0, d, 0.3)
    assert mode.variance == pytest.approx(float(stationary_variance(0.5, 1.0, d, 0.3)), rel=0.01)
    assert mode.motion == pytest.approx(float(one_step_motion(0.5, 1.0, d, 0.3)), rel=0.01)


def test_the_simulation_equals_the_recursion():
    eta, lam, d, tau, steps = 0.5, 1.0, 0.7, 0.3, 500
    rng = np.random.default_rng(3)
    z = rng.standard_normal(2) * np.sqrt(stationary_variance(eta, lam, d, tau))
    squares, motions = [], []
    for noise in rng.standard_normal((steps, 2)):
        following = (1 - eta * lam / d) * z - eta / d * tau * noise
        squares.append(following**2)
        motions.append((following - z) ** 2)
        z = following
    mode = simulate_mode(eta, lam, d, tau, steps=steps, chains=2, seed=3)
    assert mode.variance == pytest.approx(np.mean(squares), rel=1e-12)
    assert mode.motion == pytest.approx(np.mean(motions), rel=1e-12)


@given(
    rate=st.floats(0.01, 1.9),
    d=st.floats(0.1, 10),
    lam=st.floats(0.1, 10),
    tau=st.floats(0.01, 3),
    more=st.floats(1.01, 5),
)
def test_a_larger_denominator_damps_both(rate, d, lam, tau, more):
    eta = rate * d / lam
    assert stationary_variance(eta, lam, more * d, tau) < stationary_variance(eta, lam, d, tau)
    assert one_step_motion(eta, lam, more * d, tau) < one_step_motion(eta, lam, d, tau)


def test_an_unstable_mode_is_named():
    with pytest.raises(ValueError, match="d must exceed eta \\* lam / 2"):
        stationary_variance(1.0, 2.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="tau must be positive"):
        one_step_motion(0.1, 1.0, 1.0, 0.0)

"""Envelopes and two-cycles: closed forms against the iterated map and against the optimizers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llqr.lab.toy.hover import hover
from llqr.theory import (
    amplification,
    escapes,
    hovering_envelope,
    perceived_sharpness,
    probe_reach,
    scalar_step,
    two_cycle_amplitude,
    vanilla_two_cycle_amplitude,
)

RATE, LAMBDA_BAR, LAMBDA_EPS, RHO = st.floats(0.02, 1.9), st.floats(0.01, 10), st.floats(0, 100), st.floats(0.01, 3)
START = st.floats(-5, 5).filter(lambda z: abs(z) > 1e-6)


@settings(max_examples=5)
@given(wells=st.lists(st.tuples(RATE, LAMBDA_BAR, LAMBDA_EPS, RHO, START), min_size=20, max_size=20))
def test_the_scalar_map_settles_on_the_two_cycle(wells):
    rate, lambda_bar, lambda_eps, rho, z = np.array(wells).T
    eta = rate / perceived_sharpness(lambda_bar, lambda_eps)
    for _ in range(int(40 / np.minimum(rate, 2 - rate).min()) + 2000):
        z = scalar_step(z, eta, rho, lambda_bar, lambda_eps)
    amplitude = two_cycle_amplitude(eta, rho, lambda_bar, lambda_eps)
    np.testing.assert_allclose(np.abs(z), amplitude, rtol=1e-10)
    np.testing.assert_allclose(scalar_step(z, eta, rho, lambda_bar, lambda_eps), -z, rtol=1e-10)


@pytest.mark.parametrize("method", ["sam", "llqr+sam"])
def test_the_optimizers_hover_on_the_two_cycle(method):
    lambda_bar, lambda_eps = np.geomspace(0.5, 5, 9)[:, None], np.array([1.0, 4.0, 10.0])
    wells = hover(method, lambda_bar, lambda_eps, eta=0.05, rho=0.3, steps=600)
    assert len(wells.measured) == 27
    assert wells.worst_error <= 1e-10


def test_the_localized_sharpness_cancels_from_the_envelope():
    eta_mu = 0.4
    eps = np.geomspace(0.1, 1e4, 9)
    eta = eta_mu / perceived_sharpness(0.3, eps)
    amplitude = two_cycle_amplitude(eta, 0.2, 0.3, eps)
    np.testing.assert_allclose(amplitude / hovering_envelope(0.2, 0.3), eta_mu / (2 - eta_mu), rtol=1e-12)


def test_amplification_is_the_ratio_of_envelopes():
    bar = np.geomspace(0.01, 10, 7)
    np.testing.assert_allclose(hovering_envelope(0.7, bar), amplification(bar) * 0.7, rtol=1e-15)
    # With the identity as metric, LLQR+SAM is SAM.
    np.testing.assert_allclose(
        two_cycle_amplitude(0.05, 0.7, 1.0, 3.0), vanilla_two_cycle_amplitude(0.05, 0.7, 4.0), rtol=1e-15
    )


def test_the_escape_criterion_depends_on_the_average_curvature_alone():
    assert escapes(0.5, [0.2, 0.25, 0.3], 1.0).tolist() == [True, False, False]
    assert bool(escapes(1.1, 1.0, 1.0))


def test_the_probe_reaches_further_than_the_envelope():
    reach = probe_reach(0.1, 0.3, 0.5, 2.0)
    assert float(reach) == pytest.approx(float(hovering_envelope(0.3, 0.5)) * 2 / (2 - 0.1 * 5))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: two_cycle_amplitude(1.0, 0.1, 1.0, 1.0), "eta is too large: eta \\* mu must stay below 2, got 2"),
        (lambda: vanilla_two_cycle_amplitude(1.0, 0.1, 2.5), "eta \\* lambda must stay below 2, got 2.5"),
        (lambda: hovering_envelope(0.0, 1.0), "rho must be positive"),
        (lambda: hovering_envelope(1.0, -1.0), "lambda_bar must be positive"),
        (lambda: perceived_sharpness(1.0, -1.0), "lambda_eps must be finite and at least 0"),
        (lambda: escapes(1.0, 1.0, 0.0), "r_eps must be positive"),
        (lambda: two_cycle_amplitude(float("nan"), 0.1, 1.0, 1.0), "eta must be positive and finite"),
        (lambda: hover("sgd", 1.0, 1.0, eta=0.1, rho=0.1), "method must be 'sam' or 'llqr\\+sam'"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()

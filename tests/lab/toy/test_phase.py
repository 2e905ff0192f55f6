"""Escape phase diagrams: monotone, with the boundary on the paper's line."""

import numpy as np
import pytest

from llqr.lab.toy.phase import (
    PhaseDiagram,
    PhaseSettings,
    escape_diagram,
    finite_rate_envelope,
    first_rate,
    near_line,
    rate_diagram,
    simulated_escapes,
)

SETTINGS = PhaseSettings()


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.slow) for name in ("sam", "llqr+sam")])
def diagram(request):
    return request.param, escape_diagram(request.param, np.geomspace(0.1, 2, 10), np.geomspace(0.05, 4, 40))


def test_a_larger_radius_never_traps_an_iterate_again(diagram):
    assert diagram[1].monotone
    assert not diagram[1].escaped[:, 0].any()
    assert diagram[1].escaped[:, -1].all()


def test_a_flatter_average_helps_llqr_sam_but_not_sam(diagram):
    method, result = diagram
    if method == "llqr+sam":
        # Along lambda_bar: escaped cells stay escaped as the average gets flatter.
        assert (np.diff(result.escaped.astype(int), axis=0) <= 0).all()
        slope = np.polyfit(np.log(result.rows), np.log(result.boundary), 1)[0]
        assert slope == pytest.approx(0.5, abs=0.1)
    else:
        assert len(set(result.boundary)) == 1


def test_agreement_with_the_predicted_line(diagram):
    assert diagram[1].agreement >= 0.95
    assert diagram[1].agreement_off_line >= 0.95


def test_the_remaining_cells_are_explained_by_the_finite_learning_rate(diagram):
    method, result = diagram
    sharpness = result.rows + SETTINGS.lambda_eps
    rate = SETTINGS.eta * (sharpness if method == "sam" else sharpness / result.rows)
    threshold = finite_rate_envelope(rate, SETTINGS) * (1 if method == "sam" else np.sqrt(result.rows))
    assert result.agreement_with(threshold) >= max(0.98, result.agreement)


@pytest.mark.slow
def test_the_envelope_argument_fails_at_large_learning_rates():
    rates = np.array([0.1, 0.5, 1.0, 1.5, 2.2])
    result = rate_diagram(rates, np.geomspace(0.1, 4, 24))
    assert (np.diff(result.boundary[:4]) < 0).all()
    assert result.boundary[3] < 0.3  # deep inside a well that should trap according to the envelope
    assert result.escaped[4].all()  # plain descent is unstable there
    assert result.agreement_with(finite_rate_envelope(rates, SETTINGS)) >= 0.97


@pytest.mark.slow
def test_a_probe_that_reaches_past_the_flat_basin_traps_again():
    # The bowl's minimum lies 8 well radii downhill; a probe of 20 ends on the far side, where the gradient points back.
    escaped = simulated_escapes("sam", np.array([2.0, 2.0]), np.array([2.0, 20.0]), PhaseSettings(steps=2000))
    assert escaped.tolist() == [True, False]


def test_agreement_and_boundary_of_a_small_diagram():
    predicted = np.array([[False, False, True, True], [False, True, True, True]])
    assert near_line(predicted).tolist() == [[True, True, True, False], [True, True, True, False]]
    escaped = np.array([[False, True, True, False], [False, False, False, False]])
    result = PhaseDiagram(np.array([1.0, 2.0]), np.array([1.0, 2.0, 4.0, 8.0]), escaped, predicted)
    assert result.agreement == 3 / 8
    assert result.agreement_off_line == 0.0
    assert not result.monotone
    assert result.boundary[0] == pytest.approx(2**0.5)
    assert np.isnan(result.boundary[1])
    assert result.agreement_with([1.5, 100.0]) == 7 / 8


def test_a_rate_that_nothing_meets_is_no_number():
    rates = np.array([0.1, 0.2])
    assert first_rate(rates, rates > 0.1) == 0.2
    assert first_rate(rates, rates > 1) is None


def test_bad_settings_are_named():
    with pytest.raises(ValueError, match="sharpness must be positive"):
        escape_diagram("sam", [1.0], [1.0], PhaseSettings(lambda_eps=0.0))
    with pytest.raises(ValueError, match="rho must be positive"):
        escape_diagram("sam", [1.0], [-1.0])

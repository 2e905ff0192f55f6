"""The regenerative model: its bounds hold in simulation, and the rate is that of the proposition."""

import numpy as np
import pytest

from llqr.lab.toy.selection import ExitSettings, exit_times, select, simulate_exit_times
from llqr.theory import flat_exit_lower_bound, occupation, sharp_exit_upper_bound


@pytest.mark.parametrize("sigma", [0.02, 0.05, 0.2])
def test_exit_times_respect_their_bounds(sigma):
    rng = np.random.default_rng(0)
    flat = simulate_exit_times(np.ones(4000), sigma, rng)
    # E[tau] of a visit has a relative deviation of about 0.8: 4000 visits give a standard error of 1.3%.
    assert flat.mean() >= 0.96 * flat_exit_lower_bound(sigma, 1.0)
    assert flat.mean() <= 1.35 * flat_exit_lower_bound(sigma, 1.0)
    for growth in (1.1, 1.5, 3.0):
        sharp = simulate_exit_times(np.full(4000, growth), sigma, rng)
        assert sharp.mean() <= sharp_exit_upper_bound(sigma, 1.0, growth)


def test_sharp_exit_times_are_logarithmic():
    sigma = 10.0 ** -np.arange(1, 9)
    bound = np.array([sharp_exit_upper_bound(s, 1.0, 1.5) for s in sigma])
    # One more decade of R / sigma costs log(10) / log(growth) steps, up to a fraction of a step from rounding.
    wobble = bound - np.log(1 / sigma) / np.log(1.5)
    assert np.ptp(wobble[2:]) < 0.1


def test_occupation_of_sharp_wells_vanishes_at_the_rate_of_the_proposition():
    result = select(np.geomspace(0.02, 0.1, 6), cycles=6000)
    assert (result.simulated <= 1.05 * result.bound).all()
    assert result.slope_in_rate == pytest.approx(1.0, abs=0.1)
    assert 1.5 < result.slope_in_sigma < 2


def test_the_simulation_agrees_with_renewal_reward():
    result = select([0.05], cycles=20000, sharp_fraction=0.7)
    shares = occupation([0.7, 0.3], [result.sharp_time[0], result.flat_time[0]])
    assert shares.sum() == pytest.approx(1)
    assert result.simulated[0] == pytest.approx(shares[0], rel=0.05)


@pytest.mark.slow
def test_mean_exit_times_have_the_thresholds_of_the_envelopes():
    settings = ExitSettings(steps=600)
    rho = np.array([0.2, 0.65, 1.3])
    sam, llqr_sam = (exit_times(m, rho, 0.5, seeds=16, settings=settings) for m in ("sam", "llqr+sam"))
    # lambda_bar = 1/4: LLQR+SAM's envelope is twice the radius. Below both thresholds, between them, above both.
    assert sam.cut.tolist() == [1.0, 1.0, 0.0]
    assert llqr_sam.cut.tolist() == [1.0, 0.0, 0.0]
    assert llqr_sam.mean[2] < sam.mean[2]


def test_enough_noise_lets_sam_out_as_well():
    settings = ExitSettings(steps=600)
    times = exit_times("sam", 0.65, [0.1, 50.0], seeds=16, settings=settings)
    assert times.cut.tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sharp_exit_upper_bound(0.1, 1.0, 1.0), "growth must be finite and exceed 1"),
        (lambda: sharp_exit_upper_bound(0.1, 1.0, np.inf), "growth must be finite and exceed 1"),
        (lambda: sharp_exit_upper_bound(0.1, 1.0, np.nan), "growth must be finite and exceed 1"),
        (
            lambda: simulate_exit_times([0.5], 0.1, np.random.default_rng(0)),
            "growth must be finite and at least 1",
        ),
        (lambda: select([0.1], sharp_fraction=1.0), "sharp_fraction must lie strictly between"),
        (lambda: occupation([0.5, 0.5], [1.0, 0.0]), "mean_exit_times must be positive"),
        (lambda: flat_exit_lower_bound(0.0, 1.0), "sigma must be positive"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()

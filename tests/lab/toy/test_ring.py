"""The claims of both toy figures, over 32 starts and 32 noise seeds, by the real optimizers."""

from dataclasses import replace

import pytest
import torch

from llqr.lab.toy.ring import FIGURE_CONSTANTS, ejection, escape, off_bottom_starts, shared_noise

#: Half of what the figures show: the slowest path takes 438 of them to the flat basin, and nothing happens afterwards.
STEPS = 600


@pytest.fixture(scope="module")
def escaped():
    return escape(steps=STEPS)


@pytest.fixture(scope="module")
def ejected():
    return ejection(steps=STEPS)


def test_the_constants_are_shared(escaped, ejected):
    """One landscape, one learning rate, one radius for both figures and all methods."""
    assert escaped.constants == ejected.constants == FIGURE_CONSTANTS


def test_starts_lie_inside_the_sharp_well_but_off_its_bottom(escaped):
    start = escaped.trajectories["sam"].positions[0]
    assert len(start) == 32
    assert bool(escaped.landscape.in_well(start).all())
    away = (start.norm(dim=-1) - escaped.landscape.bottom().norm()).abs() / escaped.landscape.well.core
    assert float(away.min()) > 0.049
    assert all(torch.equal(run.positions[0], start) for run in escaped.trajectories.values())


def test_escape_figure_without_sam_iterates_stay_in_the_well(escaped):
    for method in ("sgd", "llqr"):
        assert bool(escaped.stays(method).all())
        end = escaped.trajectories[method].positions[-1]
        torch.testing.assert_close(end.norm(dim=-1), escaped.landscape.bottom().norm().expand(32), rtol=1e-6, atol=1e-6)


def test_escape_figure_both_sam_variants_leave_and_llqr_sam_is_faster(escaped):
    claims = escaped.escape_claims()
    assert {claim: int(holds.sum()) for claim, holds in claims.items()} == dict.fromkeys(claims, 32)
    # From every start, LLQR+SAM has lost nearly all of its loss well before SAM has.
    arrived = escaped.flat_step("llqr+sam")
    assert int((arrived > 0).sum()) == 32
    late = int(arrived.max())
    assert float(escaped.losses("llqr+sam")[late].median()) < 0.2 * float(escaped.losses("sam")[late].median())


def test_noise_figure_claims(ejected):
    claims = ejected.ejection_claims()
    assert {claim: int(holds.sum()) for claim, holds in claims.items()} == dict.fromkeys(claims, 32)


def test_noise_figure_starts_at_the_bottom_under_tiny_noise(ejected):
    start = ejected.trajectories["sam"].positions[0].requires_grad_()
    (gradient,) = torch.autograd.grad(ejected.landscape.loss(start).sum(), start)
    assert float(gradient.abs().max()) < 1e-10
    noise = shared_noise(32, 1200)
    assert float(noise.var()) == pytest.approx(1e-9, rel=0.02)
    # The schedule of a seed does not depend on the number of seeds.
    torch.testing.assert_close(shared_noise(3, 1200), noise[:, :3], rtol=0, atol=0)


def test_noise_figure_total_path_is_shorter_too(ejected):
    total = {m: ejected.trajectories[m].path_length().median() for m in ("sam", "llqr+sam")}
    assert float(total["llqr+sam"]) < float(total["sam"])


@pytest.mark.slow
def test_anisotropic_variant_still_traps_and_escapes():
    runs = ejection(replace(FIGURE_CONSTANTS, anisotropy=2.0), seeds=8, steps=500)
    claims = list(runs.ejection_claims().values())
    assert bool(claims[0].all())
    assert bool(claims[1].all())
    ratio = runs.path_to_flat("sam") / runs.path_to_flat("llqr+sam")
    assert float(ratio.median()) > 2


def test_repeated_starts_are_the_same_starts():
    rows = replace(
        FIGURE_CONSTANTS,
        **{name: torch.full((8,), getattr(FIGURE_CONSTANTS, name), dtype=torch.float64) for name in ("rho",)},
    )
    torch.testing.assert_close(off_bottom_starts(rows, 4, repeats=2)[:4], off_bottom_starts(FIGURE_CONSTANTS, 4))

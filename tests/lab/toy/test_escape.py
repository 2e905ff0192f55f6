"""What the toy commands count where few steps are allowed."""

from llqr.lab.toy.escape import run_escape


def test_starts_that_never_reach_the_flat_basin_are_not_counted_as_step_minus_one():
    found = run_escape(starts=2, steps=100)
    arrived = found.numbers["steps_to_flat"]
    assert arrived["llqr+sam"]["count"] == 2
    assert 0 < arrived["llqr+sam"]["min"] < 100
    assert arrived["sam"] == {"count": 0}


def test_in_the_isotropic_bowl_sam_with_a_larger_learning_rate_arrives_as_early():
    """The page says so: there `U` is one number."""
    arrived = run_escape(starts=8, steps=100).numbers["steps_to_flat"]
    assert arrived["SAM, lr / mean curvature"]["count"] == arrived["llqr+sam"]["count"] == 8
    assert abs(arrived["SAM, lr / mean curvature"]["median"] - arrived["llqr+sam"]["median"]) < 10

"""What the toy commands count where few steps are allowed."""

from llqr.lab.toy.escape import run_escape


def test_starts_that_never_reach_the_flat_basin_are_not_counted_as_step_minus_one():
    found = run_escape(starts=2, steps=100)
    arrived = found.numbers["steps_to_flat"]
    assert arrived["llqr+sam"]["count"] == 2
    assert 0 < arrived["llqr+sam"]["min"] < 100
    assert arrived["sam"] == {"count": 0}

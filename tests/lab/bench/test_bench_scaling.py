"""The exponent of a power law."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llqr.lab.bench import scaling


@given(st.floats(0.2, 3), st.floats(1e-9, 1))
def test_the_exponent_of_a_power_law_is_found(power, unit):
    parameters = [5_717_416, 22_050_664, 86_567_656, 304_326_632]
    assert scaling.exponent(parameters, [unit * p**power for p in parameters]) == pytest.approx(power, abs=1e-9)


def test_every_repeat_is_fitted():
    rows = [
        {"parameters": 10, "repeats": [1.0, 1.0, 1.0]},
        {"parameters": 100, "repeats": [10.0, 100.0, 31.622776601683793]},
    ]
    found = scaling.conclusion(rows)
    assert found["exponent"] == pytest.approx({"median": 1.5, "low": 1.25, "high": 1.75, "n": 3})
    assert found["paper_exponent"] == [1.27, 1.28]


def test_one_network_has_no_exponent():
    assert scaling.conclusion([{"parameters": 10, "repeats": [1.0]}]) == {}

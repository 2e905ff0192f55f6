"""Medians, quartiles, and the order in which actions take turns."""

import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llqr.lab.bench.timing import Action, Clock, interleaved, quartiles, ratio

positive = st.floats(1e-6, 1e6)


class Ticks:
    """A clock on which the n-th measurement takes n seconds."""

    def __init__(self):
        self.measured = 0

    def seconds(self, action, times=1):
        for _ in range(times):
            action()
        self.measured += 1
        return float(self.measured)


def test_a_sample_is_a_median_between_quartiles():
    assert quartiles([4.0, 1.0, 3.0, 2.0, 5.0]) == {"median": 3.0, "low": 2.0, "high": 4.0, "n": 5}
    assert quartiles([7.0]) == {"median": 7.0, "low": 7.0, "high": 7.0, "n": 1}


@given(st.lists(positive, min_size=1), st.randoms(use_true_random=False))
def test_a_sample_does_not_depend_on_the_order(values, random):
    sample = quartiles(values)
    random.shuffle(values)
    assert quartiles(values) == sample
    assert min(values) <= sample["low"] <= sample["median"] <= sample["high"] <= max(values)


@given(st.lists(st.tuples(positive, positive), min_size=1))
def test_a_ratio_is_taken_round_by_round(pairs):
    first, second = zip(*pairs, strict=True)
    assert ratio(first, second)["median"] == pytest.approx(np.median([a / b for a, b in pairs]))


def test_ratios_of_rounds_are_not_ratios_of_medians():
    assert ratio([1.0, 10.0, 3.0], [1.0, 5.0, 6.0])["median"] == 1.0


def test_actions_take_turns_in_both_directions_after_a_warm_up():
    ran = []
    actions = {
        "a": Action(lambda: ran.append("a"), repeats=2, burst=2.0, warm_up=1),
        "b": Action(lambda: ran.append("b"), repeats=2, warm_up=3),
    }
    seconds = interleaved(actions, Ticks())
    # The first tick times one run of "a", two of which then make a burst of two seconds.
    assert "".join(ran) == "aa" + "bbb" + "aab" + "baa"
    assert seconds == {"a": [2.0, 5.0], "b": [3.0, 4.0]}


@given(st.integers(1, 20), st.integers(1, 20))
def test_every_action_is_timed_as_often_as_it_asks(often, seldom):
    actions = {name: Action(lambda: None, count) for name, count in (("often", often), ("seldom", seldom))}
    seconds = interleaved(actions, Ticks())
    assert {name: len(times) for name, times in seconds.items()} == {"often": often, "seldom": seldom}


def test_rare_actions_are_spread_over_the_rounds():
    ran = []
    actions = {
        "step": Action(lambda: ran.append("s"), repeats=6, warm_up=0),
        "refresh": Action(lambda: ran.append("R"), repeats=2, warm_up=0),
    }
    interleaved(actions, Ticks())
    assert "".join(ran) == "ss" + "sR" + "ss" + "Rs"


def test_the_clock_of_a_cpu_averages_over_runs():
    ran = []
    seconds = Clock(torch.device("cpu")).seconds(lambda: (ran.append(0), time.sleep(0.01)), times=2)
    assert len(ran) == 2
    assert 0.01 <= seconds < 1

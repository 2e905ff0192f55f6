"""The search for the toy constants: reproducible, and it accepts the constants of the figures."""

from dataclasses import fields, replace

import pytest
import torch

from llqr.theory import FIGURE_CONSTANTS
from llqr.theory import search as searching


def one_row(constants):
    return replace(
        constants,
        **{name: torch.tensor([getattr(constants, name)], dtype=torch.float64) for name in searching.VARIED},
    )


@pytest.mark.slow
def test_the_constants_of_the_figures_pass_the_search():
    row = one_row(FIGURE_CONSTANTS)
    assert FIGURE_CONSTANTS.lr == searching.LEARNING_RATE
    assert bool(searching._worth_running(row).all())
    assert bool(searching._traps_plain_descent(row).all())
    holds, ratio = searching._judge(row, 32, 500)
    assert holds.tolist() == [True]
    assert float(ratio) >= 2


def test_drawn_constants_have_three_digits_and_depend_on_the_seed():
    first, again = (searching.draw(50, torch.Generator().manual_seed(7)) for _ in range(2))
    for field in fields(first):
        values = getattr(first, field.name)
        if field.name in searching.VARIED:
            assert torch.equal(values, getattr(again, field.name))
            assert all(float(f"{float(v):.3g}") == pytest.approx(float(v), rel=1e-12) for v in values)


def test_a_landscape_without_a_kick_is_not_accepted():
    soft = one_row(replace(FIGURE_CONSTANTS, hardening=0.0))
    assert not bool(searching._worth_running(soft).any())


@pytest.mark.slow
def test_the_search_finds_the_constants_of_the_figures():
    assert searching.search()[0].constants == FIGURE_CONSTANTS

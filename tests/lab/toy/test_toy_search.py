"""The search script draws the constants of the figures and accepts them."""

import runpy
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from llqr.lab.toy.ring import FIGURE_CONSTANTS

SCRIPT = Path(__file__).parents[3] / "docs" / "figures" / "toy_search.py"


@pytest.fixture(scope="module")
def searching():
    return SimpleNamespace(**runpy.run_path(str(SCRIPT)))


def one_row(constants, varied):
    return replace(
        constants, **{name: torch.tensor([getattr(constants, name)], dtype=torch.float64) for name in varied}
    )


def test_drawn_constants_have_three_digits_and_depend_on_the_seed(searching):
    first, again = (searching.draw(50, torch.Generator().manual_seed(7)) for _ in range(2))
    for field in fields(first):
        values = getattr(first, field.name)
        if field.name in searching.VARIED:
            assert torch.equal(values, getattr(again, field.name))
            assert all(float(f"{float(v):.3g}") == pytest.approx(float(v), rel=1e-12) for v in values)


def test_a_landscape_without_a_kick_is_not_accepted(searching):
    soft = one_row(replace(FIGURE_CONSTANTS, hardening=0.0), searching.VARIED)
    assert not bool(searching._worth_running(soft).any())


@pytest.mark.slow
def test_the_search_finds_the_constants_of_the_figures(searching):
    """Among the finalists: which of them comes first depends on rounding."""
    drawn = searching.draw(1_500_000, torch.Generator().manual_seed(0))
    pool = searching._take(drawn, searching._worth_running(drawn))
    pool = searching._take(pool, searching._traps_plain_descent(pool))
    rows = [searching._row(pool, row) for row in range(searching._count(pool))]
    assert (len(rows), rows.count(FIGURE_CONSTANTS)) == (2240, 1)  # as the docs say
    found = searching.search()
    assert FIGURE_CONSTANTS in [one.constants for one in found]
    assert found == sorted(found, key=lambda one: (one.robustness, one.worst_ratio), reverse=True)

"""`llqr cluster`: the costs on many devices follow the formulas, and the page shows what the command prints."""

from pathlib import Path

import pytest

from llqr.lab.results import cluster

PAGE = Path(__file__).parents[3] / "docs" / "sharded.md"


@pytest.fixture(scope="module")
def found():
    return cluster.costs()


def test_the_page_shows_what_the_command_prints(found):
    page = PAGE.read_text()
    table = cluster.as_table(found)
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        assert f"| {' | '.join(cells)} |" in page
    assert table.row_count == len(found) == 6


def test_a_step_of_vit_l_by_hand(found):
    """304,326,632 parameters; 64 images of 197 tokens; two transports in a node of eight."""
    cost = found[0]
    assert (cost["devices"], cost["shards"]) == (64, 8)
    assert cost["step_compute"] == pytest.approx(2 * 6 * 304_326_632 * 64 * 197 / 400e12)
    assert cost["apply_traffic"] == pytest.approx(2 * 4 * 304_326_632 * 7 / 8 / 300e9)
    assert cost["metric_bytes"] >= 4 * 1_367_114_178 / 8
    products, vector, copies = 19, cost["apply_traffic"] / 2, 2 * (4 * 304_326_632 / 8) * 7 / 8 / 40e9
    assert cost["refresh_traffic"] == pytest.approx((2 * products + 1) * vector + (products + 1) * copies)


def test_more_devices_cost_little_more(found):
    for small, large in ((found[0], found[2]), (found[3], found[5])):
        assert (small["devices"], large["devices"]) == (64, 1024)
        assert large["metric_bytes"] == small["metric_bytes"]
        assert large["refresh_traffic"] < 1.1 * small["refresh_traffic"]

"""Epoch times from measured steps and refreshes, and the paper's."""

import pytest

from llqr.lab.bench import cadence
from llqr.lab.bench.workload import Network
from llqr.lab.results.paper_table import paper

PAPER = paper()["cadence"]["rows"]
TIMES = {
    "SGD": [1.0, 2.0, 1.0],
    "AdamW": [1.5, 3.0, 1.5],
    "SAM": [2.0, 4.0, 2.0],
    "LLQR": [1.25, 2.5, 1.25],
    "LLQR+SAM": [2.5, 5.0, 2.5],
    "refresh": [100.0, 90.0, 300.0],
}
FIRST = 1000.0


def test_an_epoch_has_the_papers_number_of_updates_at_every_interval():
    rows = cadence.rows(Network("vit-b"), TIMES, FIRST, cadence.EPOCH_STEPS)
    assert [(row["method"], row["interval"], row["updates"]) for row in rows] == [
        (row["method"], row["interval"], row["updates"]) for row in PAPER if row["arch"] == "ViT-B/16"
    ]


def test_an_epoch_is_its_steps_and_its_refreshes():
    rows = {(row["method"], row["interval"]): row for row in cadence.rows(Network("vit-b"), TIMES, FIRST, 1200)}
    row = rows["LLQR+SAM", 500]
    assert row["epoch_seconds"]["median"] == 1200 * 2.5 + 3 * 100
    # Every round is compared with its own SAM step, and the slow one is as slow for both.
    assert row["vs_sam"]["median"] == (1200 * 2.5 + 300) / 2400
    assert row["vs_sam"]["low"] < row["vs_sam"]["median"]
    assert row["lasting_vs_sam"]["median"] == pytest.approx((2.5 + 100 / 500) / 2)
    assert row["vs_sgd"]["median"] == (1200 * 2.5 + 300) / 1200
    assert row["first_refresh_seconds"] == 1000
    assert rows["AdamW", None]["vs_sgd"] == {"median": 1.5, "low": 1.5, "high": 1.5, "n": 3}
    assert rows["SAM", None]["vs_sam"]["median"] == rows["SAM", None]["lasting_vs_sam"]["median"] == 1


@pytest.mark.parametrize(("network", "vs_sam", "refresh"), [("ViT-B/16", 1.66, 40.58), ("vit-l", 3.21, 96.57)])
def test_the_papers_ratios_are_given_too(network, vs_sam, refresh):
    found = cadence.printed(Network.parse(network), "LLQR+SAM", 500)
    assert (round(found["vs_sam"], 2), found["refresh_seconds"]) == (vs_sam, refresh)


@pytest.mark.parametrize("network", ["vit-s", "vit-b:depth=2", "vit-b/32"])
def test_a_network_that_is_not_in_the_paper_has_no_ratios(network):
    assert cadence.printed(Network.parse(network), "SAM", None) is None


def test_the_table_prints_every_row():
    rows = list(cadence.rows(Network("vit-l"), TIMES, FIRST, 1563))
    assert cadence.as_table(rows).row_count == 15

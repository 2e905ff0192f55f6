"""What a rank of a shared metric holds and receives: planned, imitated, and counted in real processes."""

from dataclasses import replace

import pytest
import torch.distributed as dist

import llqr
from llqr.lab.bench import shards
from llqr.lab.bench.measured_refresh import RefreshSettings
from llqr.lab.bench.workload import Network, Setup
from tiny_workloads import FP32, VIT

SETTINGS = RefreshSettings("e-kfac", "unfused", llqr.Runtime(engine="forward"), llqr.Inner(steps=3, product_every=2))


SETUP = Setup([Network.parse(VIT)], 4, FP32)


def one_rank(count, settings=SETTINGS):
    return shards.one_rank(SETUP, SETUP.networks[0], settings, count, 2)


def assert_within_the_formulas(row):
    """Each vector comes with its padding and nothing else; numbers that ranks agree about are a few bytes each."""
    exact, padding = row["step_formula"], row["padding"]
    assert row["step_payload"] == exact + padding
    assert row["refresh_formula"] == row["vectors"] * exact
    assert row["refresh_payload"] == row["vectors"] * (exact + padding)
    assert 0 < row["numbers"] < 200 * row["shards"] * row["vectors"]


def test_the_papers_networks_are_planned():
    printed = [row for row in shards.planned("e-kfac", (1, 4)) if row["paper_mib"] is not None]
    assert [(row["model"], row["shards"]) for row in printed] == [
        (model, count) for model in ("ViT-Ti/16", "ViT-B/16", "ViT-L/16") for count in (1, 4)
    ]
    for row in printed:
        assert 0.999 * row["paper_mib"] <= row["metric_bytes"] / 2**20 <= 1.01 * row["paper_mib"]


def test_one_rank_is_imitated():
    rows = [one_rank(count) for count in (1, 2, 4)]
    assert not dist.is_initialized()
    assert [row["shards"] for row in rows] == [1, 2, 4]
    assert "step_payload" not in rows[0]
    for row in rows:
        assert row["refresh_bytes"] is None, "the CPU's allocator does not count"
        assert row["apply_seconds"]["median"] > 0
        assert row["metric_bytes"] >= rows[0]["metric_bytes"] / row["shards"]
    for row in rows[1:]:
        assert_within_the_formulas(row)
    assert shards.as_table(rows).row_count == 3


def test_several_gradients_travel_one_by_one():
    inner = llqr.Inner(steps=2, gradients=2)
    row = one_rank(2, replace(SETTINGS, structure="kfac", inner=inner))
    assert row["vectors"] == 2 * inner.products + 3
    assert_within_the_formulas(row)


@pytest.mark.slow
def test_real_processes_receive_what_is_imitated():
    *_, imitated, real = shards.measure(SETUP, SETTINGS, (2,), 2, processes=True)
    assert (imitated["what"], real["what"]) == ("one rank", "gloo")
    assert_within_the_formulas(real)
    keys = ("step_payload", "refresh_payload", "padding", "metric_bytes")
    assert [real[key] for key in keys] == [imitated[key] for key in keys]

"""What `cadence`, `host`, `memory` and `scaling` make of measured times and bytes."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import llqr
from llqr.lab.bench import cadence, host, memory, scaling
from llqr.lab.bench.refresh import RefreshSettings, geometry_of
from llqr.lab.bench.workload import Network, Setup
from llqr.lab.config.strict import ConfigurationError
from llqr.lab.results.tables import paper
from tiny_workloads import FP32, MLP, workload

PAPER = paper()["cadence"]["rows"]
TIMES = {
    "SGD": [1.0, 2.0, 1.0],
    "AdamW": [1.5, 3.0, 1.5],
    "SAM": [2.0, 4.0, 2.0],
    "LLQR": [1.25, 2.5, 1.25],
    "LLQR+SAM": [2.5, 5.0, 2.5],
    "refresh": [100.0, 90.0, 300.0],
}


def test_an_epoch_has_the_papers_number_of_updates_at_every_interval():
    rows = list(cadence.rows(Network("vit-b"), TIMES, 1000.0, cadence.EPOCH_STEPS))
    assert [(row["method"], row["interval"], row["updates"]) for row in rows] == [
        (row["method"], row["interval"], row["updates"]) for row in PAPER if row["arch"] == "ViT-B/16"
    ]
    assert cadence.as_table(rows).row_count == 15


def test_an_epoch_is_its_steps_and_its_refreshes():
    rows = {(row["method"], row["interval"]): row for row in cadence.rows(Network("vit-b"), TIMES, 1000.0, 1200)}
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


def test_between_sparse_probes_steps_are_those_without_a_probe():
    found = list(cadence.rows(Network("vit-b"), TIMES, 1000.0, 1200, probe_every=4))
    assert {row["method"] for row in found} - set(cadence.METHODS) == {"SAM, every 4", "LLQR+SAM, every 4"}
    rows = {(row["method"], row["interval"]): row for row in found}
    assert rows["SAM, every 4", None]["step_seconds"]["median"] == (3 * 1 + 2) / 4
    assert rows["LLQR+SAM, every 4", 500]["lasting_vs_sam"]["median"] == ((3 * 1.25 + 2.5) / 4 + 100 / 500) / 2
    assert [rows[key]["passes"] for key in (("SGD", None), ("LLQR+SAM", 50), ("LLQR+SAM, every 4", 50))] == [1, 2, 1.25]
    assert rows["SAM, every 4", None]["paper"] is None
    assert cadence.as_table(found).row_count == 22


@pytest.mark.parametrize(("network", "vs_sam", "refresh"), [("vit-b", 1.66, 40.58), ("vit-l", 3.21, 96.57)])
def test_the_papers_ratios_are_given_too(network, vs_sam, refresh):
    found = cadence.printed(Network.parse(network), "LLQR+SAM", 500)
    assert (round(found["vs_sam"], 2), found["refresh_seconds"]) == (vs_sam, refresh)


@pytest.mark.parametrize("network", ["vit-s", "vit-b:depth=2", "vit-b:patch=32"])
def test_a_network_that_is_not_in_the_paper_has_no_ratios(network):
    assert cadence.printed(Network.parse(network), "SAM", None) is None


def test_memory_is_measured_once_for_every_method_and_structure(monkeypatch):
    """The network has Linear(12, 4) and Linear(4, 3): 67 parameters in 2 layers."""
    count = itertools.count(1)

    def peak(device, action):
        action()
        return next(count)

    monkeypatch.setattr(memory, "peak", peak)
    monkeypatch.setattr(Setup, "workload", lambda setup, network: workload(network.label))
    runtime, inner = llqr.Runtime(engine="forward"), llqr.Inner(steps=2)
    settings = [RefreshSettings(structure, runtime=runtime, inner=inner) for structure in ("diagonal", "e-kfac")]
    setup = Setup([Network.parse(MLP)], 4, SimpleNamespace(device=SimpleNamespace(type="cuda")))
    rows = list(memory.measure(setup, settings))
    diagonal, ekfac = 4 * 67, 4 * ((16 + 144 + 48 + 4) + (9 + 16 + 12 + 3))
    assert [(row["what"], row["structure"], row["metric_bytes"]) for row in rows] == [
        *((method, None, 0) for method in ("SGD", "AdamW", "SAM", "F-SAM")),
        *((what, "diagonal", diagonal) for what in ("LLQR", "LLQR+SAM", "refresh")),
        *((what, "e-kfac", ekfac) for what in ("LLQR", "LLQR+SAM", "refresh")),
    ]
    assert [row["peak_bytes"] for row in rows] == list(range(1, 11))
    assert [row["vs_sam"] for row in rows] == [n / 3 for n in range(1, 11)]
    assert memory.as_table(rows).row_count == 10


def test_peak_memory_needs_a_cuda_device():
    with pytest.raises(ConfigurationError, match="--device: peak memory is counted by the allocator of a CUDA device"):
        list(memory.measure(Setup([Network.parse(MLP)], 4, FP32), []))


@given(st.floats(0.2, 3), st.floats(1e-9, 1))
def test_the_exponent_of_a_power_law_is_found(power, unit):
    sizes = [5_717_416, 22_050_664, 86_567_656, 304_326_632]
    found = scaling.conclusion([{"parameters": size, "repeats": [unit * size**power]} for size in sizes])
    assert found["exponent"]["median"] == pytest.approx(power, abs=1e-9)


def test_every_repeat_is_fitted():
    rows = [
        {"parameters": 10, "repeats": [1.0, 1.0, 1.0]},
        {"parameters": 100, "repeats": [10.0, 100.0, 31.622776601683793]},
    ]
    found = scaling.conclusion(rows)
    assert found["exponent"] == pytest.approx({"median": 1.5, "low": 1.25, "high": 1.75, "n": 3})
    assert found["paper_exponent"] == [1.27, 1.28]
    assert scaling.conclusion(rows[:1]) == {}


def test_host_divides_steps_and_refreshes_by_what_they_are_compared_with(monkeypatch):
    monkeypatch.setattr(host, "STEPS", 2)
    rows = list(host.measure(Setup([Network.parse(MLP)], 4, FP32), repeats=2))
    refreshes = [(row["structure"], row["engine"], row["product_every"]) for row in rows if row["what"] == "refresh"]
    assert refreshes == [(s, e, str(k)) for s in host.STRUCTURES for e in host.ENGINES for k in host.INTERVALS]
    assert {row["what"]: row["relative_to"] for row in rows} == {
        "SAM": "pytorch_optimizer's SAM",
        "LLQR+SAM": "SAM",
        "arithmetic": "51 products",  # of a refresh; of a step, relative to SAM
        "refresh": "51 products",
    }
    assert all(row["ratio"]["n"] == 2 and row["ratio"]["median"] > 0 for row in rows)
    assert host.as_table(rows).row_count == len(rows)


def test_the_bare_products_of_host_are_those_of_the_fisher_matrix():
    """Otherwise a refresh would be compared with other work than its own."""
    work = workload(MLP)
    theta = {name: parameter.detach() for name, parameter in work.model.named_parameters()}
    v = {name: torch.randn_like(parameter) for name, parameter in theta.items()}
    with geometry_of(work, RefreshSettings("diagonal")).quadratic_model(work.batch) as model:
        exact = model.product(v)
    for name, part in host.bare_product(work, theta)(v).items():
        torch.testing.assert_close(part, exact[name])

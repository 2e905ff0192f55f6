"""Inside a refresh: its error against the exact one, the time of its parts, and engines that refuse."""

from dataclasses import asdict

import pytest
import torch
from torch.nn.functional import cross_entropy

import llqr
from llqr.lab.bench import refresh
from llqr.lab.bench.measured_refresh import MeasuredRefresh, RefreshSettings
from llqr.lab.bench.refresh import ExactRefresh, distance, size
from llqr.lab.bench.workload import Network, Passes, Setup, Workload
from llqr.lab.passes import Precision
from references import dense_fisher, dense_gradient, flat, relative_error
from tiny_workloads import FP32, MLP, VIT, workload


def settings(structure, engine="forward", attention="fused", **inner):
    return RefreshSettings(structure, attention, llqr.Runtime(engine=engine), llqr.Inner(**inner))


EXACT = settings("kfac", steps=4)


def measured(network, ways, reference=None):
    return list(refresh.measure(Setup([Network.parse(network)], 4, FP32), ways, Passes(), 1, reference))


def test_the_reference_is_the_dense_fisher_in_float64():
    work = workload(MLP)
    exact = ExactRefresh.of(work, EXACT, torch.float64)
    model, (images, labels) = work.model.double(), work.batch
    fisher = dense_fisher(model, images.double())
    assert relative_error(flat(exact.gradient), dense_gradient(model, cross_entropy, (images.double(), labels))) < 1e-12
    for name, v in exact.directions.items():
        assert relative_error(flat(exact.products[name]), fisher @ flat(v)) < 1e-12
    assert exact.products.keys() == {"= g", "random"}


def test_the_reference_leaves_weights_and_precision_as_they_are():
    work = workload(MLP)
    before = flat(dict(work.model.named_parameters())).clone()
    ExactRefresh.of(work, EXACT, torch.float64)
    assert flat(dict(work.model.named_parameters())).equal(before)
    assert work.precision is FP32


def test_an_exact_engine_has_the_error_of_its_rounding():
    work = workload(MLP)
    exact = ExactRefresh.of(work, EXACT, torch.float64)
    refresh = MeasuredRefresh(work, EXACT)
    errors = exact.errors(refresh, refresh.run().accepted)
    assert errors.keys() == {"Hv, v = g", "Hv, v random", "Ug"}
    assert all(0 < error < 1e-4 for error in errors.values())


def test_errors_are_relative_to_the_product_and_to_the_learned_change():
    """A metric that learned 1.1 times the change is wrong by a tenth of it, whatever the size of `g`."""
    work = workload(MLP)
    one = ExactRefresh.of(work, settings("diagonal", steps=4), torch.float64)
    refresh = MeasuredRefresh(work, settings("diagonal", steps=4))
    refresh.run()
    metric = refresh.geometry.metric
    [own] = [group for group in metric.factors() if group]
    metric.assign([{name: 1 + 1.1 * (factor - 1) for name, factor in own.items()}])
    assert one.errors(refresh, True)["Ug"] == pytest.approx(0.1, rel=1e-2)
    assert one.errors(refresh, False)["Ug"] is None
    half = {name: {key: 0.5 * part for key, part in v.items()} for name, v in one.directions.items()}
    wrong = type(one)(one.gradient, half, one.products, one.Ug, one.reason).errors(refresh, True)
    assert wrong["Hv, v = g"] == pytest.approx(0.5, rel=1e-4)


def test_distances_are_taken_over_all_parameters_in_double():
    a = {"x": torch.tensor([3.0]), "y": torch.tensor([0.0, 4.0])}
    assert size(a) == 5.0
    assert distance({"x": a["x"].double(), "y": torch.tensor([1.0, 4.0])}, a) == 1.0


def test_an_engine_that_refuses_the_network_says_so_in_its_row():
    refused, fine = measured(
        VIT, [settings("diagonal", engine, steps=2) for engine in ("forward", "finite-differences")]
    )
    assert "forward AD" in refused["refused"]
    assert fine["seconds"]["n"] == 1
    assert fine["accepted"]
    table = refresh.as_table([refused, fine])
    assert table.row_count == 2
    assert table.caption == refused["refused"]


def test_unfused_attention_has_forward_mode():
    [row] = measured(VIT, [settings("diagonal", attention="unfused", steps=2)])
    assert row["engine"] == "forward"
    assert row["products"] == 2
    assert row["seconds_a_product"] == pytest.approx(row["seconds"]["median"] / 2)


def test_fewer_products_are_counted_and_their_error_is_against_all_of_them():
    """Of 40 steps: all; the first two, the 21st."""
    ways = [settings("diagonal", attention="unfused", steps=40, product_every=every) for every in (1, 20)]
    all_of_them, few = measured(VIT, ways, reference=torch.float64)
    assert [(row["product_every"], row["products"]) for row in (all_of_them, few)] == [(1, 40), (20, 3)]
    assert all_of_them["errors"]["Ug"] < few["errors"]["Ug"] < 0.1
    shown = refresh.as_table([all_of_them, few]).columns
    assert [list(column.cells) for column in shown if column.header == "product every"] == [["1", "20"]]


def test_unknown_settings_are_named():
    with pytest.raises(ValueError, match="attention: unknown 'flash'; choose one of fused, unfused"):
        RefreshSettings(attention="flash")
    with pytest.raises(ValueError, match="engine: unknown 'magic'"):
        settings("diagonal", "magic")


def test_what_is_recorded_is_what_was_measured():
    bf16 = Precision("bf16", torch.device("cpu"))
    told = settings("kfac", steps=3).to_dict(bf16)
    made = MeasuredRefresh(Workload(Network.parse(MLP), 4, bf16), settings("kfac", steps=3)).geometry
    assert told["runtime"]["autocast"] == "bfloat16"
    assert made.runtime == settings("kfac").runtime_in(bf16)
    assert told["inner"] == asdict(made.inner)

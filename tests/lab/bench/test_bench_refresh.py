"""A measured refresh: its error against the exact one, and engines that refuse."""

import pytest
import torch
from torch.nn.functional import cross_entropy

import llqr
from llqr.lab.bench import refresh
from llqr.lab.bench.refresh import RefreshSettings, distance, exact_effect, geometry_of, relative_error
from llqr.lab.bench.workload import Network, PassOptions, Setup, Workload
from llqr.lab.passes import Precision
from references import dense_gradient, flat
from references import relative_error as error_of
from tiny_workloads import FP32, MLP, VIT, workload


def settings(structure, engine="forward", attention="fused", **inner):
    return RefreshSettings(structure, attention, llqr.Runtime(engine=engine), llqr.Inner(**inner))


EXACT = settings("kfac", steps=4)


def setup(network):
    return Setup([Network.parse(network)], 4, FP32)


def measured(network, ways, reference=None):
    return list(refresh.measure(setup(network), ways, PassOptions(), 1, reference))


def exact(learned):
    return exact_effect(setup(MLP), Network.parse(MLP), learned, torch.float64)


def test_the_reference_is_in_float64_at_the_weights_and_on_the_batch_that_are_measured():
    gradient, Ug = exact(EXACT)
    work = workload(MLP)
    images, labels = work.batch
    expected = dense_gradient(work.model.double(), cross_entropy, (images.double(), labels))
    assert error_of(flat(gradient), expected) < 1e-12
    assert flat(Ug).dtype == torch.float64


def test_an_exact_engine_has_the_error_of_its_rounding():
    work = workload(MLP)
    own = geometry_of(work, EXACT)
    assert own.refresh(work.batch).accepted
    assert 0 < relative_error(own.metric, *exact(EXACT)) < 1e-4


def test_the_error_is_relative_to_the_learned_change():
    """A metric that learned 1.1 times the change is wrong by a tenth of it, whatever the size of `g`."""
    work, learned = workload(MLP), settings("diagonal", steps=4)
    own = geometry_of(work, learned)
    own.refresh(work.batch)
    metric = own.metric
    [factors] = [group for group in metric.factors() if group]
    metric.assign([{name: 1 + 1.1 * (factor - 1) for name, factor in factors.items()}])
    assert relative_error(metric, *exact(learned)) == pytest.approx(0.1, rel=1e-2)


def test_distances_are_taken_over_all_parameters_in_double():
    a = {"x": torch.tensor([3.0]), "y": torch.tensor([0.0, 4.0])}
    assert distance({"x": torch.zeros(1).double(), "y": torch.zeros(2)}, a) == 5.0


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


def test_unknown_settings_are_named():
    with pytest.raises(ValueError, match="engine: unknown 'magic'"):
        settings("diagonal", "magic")


def test_a_refresh_has_the_autocast_of_the_passes():
    bf16 = Precision("bf16", torch.device("cpu"))
    made = geometry_of(Workload(Network.parse(MLP), 4, bf16), settings("kfac", steps=3))
    assert made.runtime.autocast == torch.bfloat16
    assert made.inner == settings("kfac", steps=3).inner

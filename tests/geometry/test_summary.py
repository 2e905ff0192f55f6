"""A refresh says what its metric does to a gradient, and a metric that does nothing says so."""

import warnings

import pytest
import torch
import torch.nn.functional as F

import llqr
from geometries import flat_geometry
from references import dense_gradient, dense_metric, trainable
from small_models import case


def learned(structure="e-kfac", **settings):
    drawn = case("mlp")
    geometry = flat_geometry(drawn.model, F.cross_entropy, structure=structure, **({"ema": 0.0} | settings))
    return drawn, geometry, geometry.refresh(drawn.batch)


@pytest.mark.parametrize("structure", ["diagonal", "scalar", "kfac", "e-kfac", "e-kfac-one-sided"])
def test_change_and_cosine_are_those_of_the_dense_metric(structure):
    drawn, geometry, report = learned(structure, lr=0.05)
    g = dense_gradient(drawn.model, drawn.loss_fn, drawn.batch)
    Ug = dense_metric(geometry.metric, trainable(drawn.model)) @ g
    assert report.change == pytest.approx(float((Ug - g).norm() / g.norm()), rel=1e-9)
    assert report.cosine == pytest.approx(float(F.cosine_similarity(Ug, g, dim=0)), rel=1e-9)


def test_layers_add_up_to_the_whole():
    drawn, geometry, report = learned(lr=0.05)
    with geometry.quadratic_model(drawn.batch) as model:
        gradient = model.gradient
    total = changed = 0.0
    for layer, effect in geometry.layer_effects().items():
        square = sum(float(part.square().sum()) for name, part in gradient.items() if name.rpartition(".")[0] == layer)
        total += square
        changed += effect.change**2 * square
    assert report.change == pytest.approx((changed / total) ** 0.5, rel=1e-9)


def test_the_identity_changes_nothing():
    report = learned("identity")[2]
    assert (report.change, report.cosine) == (0.0, pytest.approx(1.0))


def test_before_the_first_refresh_it_says_so():
    geometry = llqr.Geometry(case("mlp").model, F.cross_entropy)
    assert geometry.summary() == "U is the identity: no refresh has been accepted yet."


def test_a_gradient_of_zero_has_no_change_to_measure():
    """As where all targets of a batch are ignored."""
    drawn = case("mlp")
    geometry = flat_geometry(drawn.model, lambda z, t: 0.0 * z.square().mean(), structure="diagonal")
    with warnings.catch_warnings(action="ignore"):
        assert geometry.refresh(drawn.batch).accepted
    assert geometry.summary().startswith("The last inner gradient was zero: U has no effect to measure")


def test_a_metric_that_does_nearly_nothing_names_the_way_out():
    _, geometry, report = learned("diagonal", lr=1e-5)
    assert 0 < report.change < 0.01
    first = geometry.summary().splitlines()[0]
    assert first.startswith("U changes a gradient by 0.")
    assert "it does nearly nothing; try more frequent refreshes" in first


def test_a_metric_that_matters_is_a_sentence_and_a_table():
    _, geometry, _ = learned(lr=0.05)
    sentence, heading, *rows = geometry.summary().splitlines()
    assert sentence.startswith("U changes a gradient by ")
    assert "after 1 refresh." in sentence
    assert heading.split() == ["layer", "change", "cosine", "gain"]
    assert {row.split()[0] for row in rows} == set(geometry.layer_effects())


def test_a_model_that_is_one_layer_has_a_row_with_a_name():
    geometry = llqr.Geometry(torch.nn.Linear(3, 2), F.cross_entropy)
    for _ in range(2):
        geometry.refresh((torch.randn(4, 3), torch.tensor([0, 1, 1, 0])))
    sentence, *_, row = geometry.summary().splitlines()
    assert "after 2 refreshes" in sentence
    assert row.startswith("(model) ")


def test_several_weak_refreshes_in_a_row_are_warned_of_once():
    drawn = case("mlp")
    geometry = flat_geometry(drawn.model, F.cross_entropy, lr=1e-6, steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            geometry.refresh(drawn.batch)
    with pytest.warns(llqr.RefreshWarning, match="nearly nothing; try more frequent refreshes") as told:
        geometry.refresh(drawn.batch)
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            geometry.refresh(drawn.batch)


def test_a_rejected_refresh_leaves_the_summary_as_it_was():
    drawn, geometry, _ = learned(lr=0.05)
    before = geometry.summary()
    bad = (torch.full_like(drawn.batch[0], float("nan")), drawn.batch[1])
    with pytest.warns(llqr.RefreshWarning, match="not finite"):
        assert not geometry.refresh(bad).accepted
    assert geometry.summary() == before


def test_after_loading_a_state_it_waits_for_the_next_refresh():
    drawn, geometry, _ = learned(lr=0.05)
    fresh = flat_geometry(drawn.model, F.cross_entropy, structure="e-kfac")
    fresh.load_state_dict(geometry.state_dict())
    assert fresh.summary().startswith("U was learned before its state was loaded")


def test_loading_a_state_forgets_what_was_measured_before():
    drawn, geometry, _ = learned(lr=0.05)
    geometry.load_state_dict(flat_geometry(drawn.model, F.cross_entropy, structure="e-kfac").state_dict())
    assert geometry.summary().startswith("U is the identity: no refresh has been accepted yet")
    assert geometry.layer_effects() == {}


@pytest.mark.parametrize("every", [1, 7])
def test_an_estimate_learns_nothing(every):
    """The trajectory with an estimate before it is that without, bit by bit."""
    ends = []
    for estimated in (False, True):
        drawn = case("mlp")
        geometry = flat_geometry(drawn.model, F.cross_entropy, structure="kfac", steps=5, lr=0.05, every=every)
        before = torch.get_rng_state()
        if estimated:
            found = geometry.estimate(drawn.batch)
            assert set(found) == {"refresh_seconds", "apply_seconds"}
            assert geometry.due
            assert not geometry.metric.learned
            assert geometry.refreshes == 0
        assert torch.get_rng_state().equal(before)
        geometry.refresh(drawn.batch)
        ends.append(geometry.metric.state_dict()["factors"])
    assert all(factor.equal(ends[1][name]) for name, factor in ends[0].items())


def test_an_estimate_is_of_the_whole_refresh(monkeypatch):
    """Keeping large matrices inside bounds may take longer than the inner loop."""
    drawn = case("mlp")
    geometry = flat_geometry(drawn.model, F.cross_entropy, structure="kfac", steps=1, bounds=(0.1, 10.0))
    projected = []
    monkeypatch.setattr(geometry.metric, "constrain", lambda factors: projected.append(1) or factors)
    geometry.estimate(drawn.batch)
    assert projected


def test_a_run_too_short_for_the_metric_is_announced():
    drawn = case("mlp")

    def geometry(**settings):
        return flat_geometry(drawn.model, F.cross_entropy, steps=1, **settings)

    with pytest.warns(llqr.RefreshWarning, match=r"^steps: 900 have 2 refreshes, which move U by 9.[78] % of "):
        geometry(every=500).estimate(drawn.batch, steps=900)
    with pytest.warns(llqr.RefreshWarning, match="steps: 20 have 3 refreshes"):
        geometry(every=lambda step: 5 if step < 10 else 50).estimate(drawn.batch, steps=20)
    with warnings.catch_warnings(action="error"):
        geometry(every=45).estimate(drawn.batch, steps=900)
        geometry(every=500, debias=True).estimate(drawn.batch, steps=900)
        geometry(every=500, ema=0.5).estimate(drawn.batch, steps=900)

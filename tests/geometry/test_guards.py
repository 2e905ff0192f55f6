"""A refresh that fails keeps the old metric bit by bit, is counted, warns once, and is an error only after many."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import llqr
from geometries import flat_geometry
from small_models import case

LinAlgError = torch.linalg.LinAlgError


def geometry_of(drawn, **options):
    options = {"structure": "e-kfac", "steps": 3, "engine": "double-backward", "every": 1} | options
    return flat_geometry(drawn.model, drawn.loss_fn, **options)


def copied(geometry):
    return {name: factor.clone() for name, factor in geometry.metric.named_factors().items()}


def assert_kept(geometry, before):
    assert all(factor.equal(before[name]) for name, factor in geometry.metric.named_factors().items())


def good_then(drawn, **options):
    geometry = geometry_of(drawn, **options)
    assert geometry.refresh(drawn.batch).accepted
    return geometry, copied(geometry)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("solver", ["heavy-ball", "adam", "pcg"])
@pytest.mark.parametrize("engine", ["double-backward", "auto"])
def test_a_loss_that_is_not_finite(value, solver, engine):
    drawn = case("mlp")
    geometry, before = good_then(drawn, structure="diagonal", solver=solver, engine=engine)
    bad = torch.full_like(drawn.batch[0], value), drawn.batch[1]
    with pytest.warns(llqr.RefreshWarning, match="kept the old metric, because the loss or its gradient is not finite"):
        refresh = geometry.refresh(bad)
    assert not refresh.accepted
    assert refresh.reason == "the loss or its gradient is not finite"
    assert refresh.objective_after != refresh.objective_after
    assert_kept(geometry, before)


def test_a_first_refresh_that_fails_leaves_the_identity():
    drawn = case("mlp")
    geometry = geometry_of(drawn, engine="auto")
    with pytest.warns(llqr.RefreshWarning, match="not finite"):
        geometry.refresh((drawn.batch[0] * float("nan"), drawn.batch[1]))
    assert not geometry.metric.learned
    assert geometry.refresh(drawn.batch).accepted


@pytest.mark.parametrize("structure", ["kfac", "e-kfac", "diag-kfac", "e-kfac-psd", "dense"])
def test_an_inner_loop_that_explodes(structure):
    drawn = case("mlp")
    geometry, before = good_then(drawn, structure=structure, lr=lambda step: 1e-3 if step == 0 else 1e6)
    geometry.advance()
    with pytest.warns(llqr.RefreshWarning, match="objective"):
        refresh = geometry.refresh(drawn.batch)
    assert not refresh.accepted
    assert "objective" in refresh.reason
    assert_kept(geometry, before)


def test_an_objective_that_rose_is_told():
    drawn = case("mlp")
    geometry = geometry_of(drawn, structure="kfac", lr=10.0, clip=1e9)
    with pytest.warns(llqr.RefreshWarning, match="the objective rose from -?[0-9.]+ to [0-9.]"):
        refresh = geometry.refresh(drawn.batch)
    assert refresh.objective_after > refresh.objective_before


def test_a_metric_that_turns_a_gradient_around():
    drawn = case("mlp")
    geometry = geometry_of(drawn, structure="dense", lr=0.0)
    geometry.metric.assign([{name: -factor for name, factor in group.items()} for group in geometry.metric.factors()])
    before = copied(geometry)
    with pytest.warns(llqr.RefreshWarning, match=r"g\.Ug = -[0-9.e-]+ is not positive"):
        refresh = geometry.refresh(drawn.batch)
    assert not refresh.accepted
    assert_kept(geometry, before)


def test_a_gradient_of_zero_is_no_failure():
    model = nn.Linear(4, 3)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    geometry = flat_geometry(model, F.mse_loss, steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", llqr.RefreshWarning)
        refresh = geometry.refresh((torch.randn(5, 4), torch.zeros(5, 3)))
    assert refresh.accepted
    assert refresh.gradient_norm == 0.0


def test_a_decomposition_that_fails(monkeypatch):
    drawn = case("mlp")
    geometry, before = good_then(drawn, structure="dense", bounds=(0.5, 2.0))

    def fail(matrix):
        raise LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "eigh", fail)
    with pytest.warns(llqr.RefreshWarning, match=r"a decomposition failed \(did not converge\)"):
        refresh = geometry.refresh(drawn.batch)
    assert not refresh.accepted
    assert_kept(geometry, before)


@pytest.mark.parametrize("engine", ["auto", "double-backward"])
def test_a_decomposition_that_fails_inside_the_model(engine):
    class Whitened(nn.Linear):
        def forward(self, x):
            return super().forward(x @ torch.linalg.cholesky(x.mT @ x))

    torch.manual_seed(0)
    geometry = flat_geometry(Whitened(4, 3), F.cross_entropy, steps=2, engine=engine, every=1)
    singular = torch.zeros(8, 4), torch.randint(3, (8,))
    with pytest.warns(llqr.RefreshWarning, match="a decomposition failed"):
        assert not geometry.refresh(singular).accepted
    assert geometry.refresh((torch.randn(8, 4), torch.randint(3, (8,)))).accepted


def test_counting_warning_once_and_raising_after_many():
    drawn = case("mlp")
    geometry, before = good_then(drawn, max_failures=3)
    bad = drawn.batch[0] * float("nan"), drawn.batch[1]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            geometry.advance()
            assert not geometry.refresh(bad).accepted
    told = [w for w in caught if w.category is llqr.RefreshWarning]
    assert len(told) == 1
    assert "refresh at step 1: kept the old metric" in str(told[0].message)
    assert told[0].filename == __file__  # it points at who called refresh
    assert (geometry.refreshes, geometry.failures) == (3, 2)
    geometry.advance()
    with pytest.raises(llqr.RefreshError, match=r"refresh at step 3: .*not finite; 3 in a row \(max_failures=3\)"):
        geometry.refresh(bad)
    assert geometry.failures == 3
    assert_kept(geometry, before)


def test_a_good_refresh_starts_the_row_anew():
    drawn = case("mlp")
    geometry = geometry_of(drawn, max_failures=2)
    bad = drawn.batch[0] * float("nan"), drawn.batch[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", llqr.RefreshWarning)
        for _ in range(3):
            assert not geometry.refresh(bad).accepted
            assert geometry.refresh(drawn.batch).accepted
        assert geometry.failures == 3
        geometry.refresh(bad)
        with pytest.raises(llqr.RefreshError):
            geometry.refresh(bad)


def test_the_row_survives_a_resume():
    drawn = case("mlp")
    first, second = geometry_of(drawn, max_failures=2), geometry_of(drawn, max_failures=2)
    bad = drawn.batch[0] * float("nan"), drawn.batch[1]
    with pytest.warns(llqr.RefreshWarning):
        first.refresh(bad)
    second.load_state_dict(first.state_dict())
    assert second.failures == 1
    with pytest.raises(llqr.RefreshError):
        second.refresh(bad)


def test_training_goes_on_with_the_old_metric():
    drawn = case("mlp")
    geometry, before = good_then(drawn, every=5)
    geometry.advance()
    grads = {name: torch.randn_like(p) for name, p in geometry.parameters.items()}
    expected = geometry.metric.apply(grads)
    with pytest.warns(llqr.RefreshWarning):
        geometry.refresh((drawn.batch[0] * float("nan"), drawn.batch[1]))
    assert all(part.equal(expected[name]) for name, part in geometry.metric.apply(grads).items())
    # It is not tried again before its time.
    assert not geometry.due
    for _ in range(5):
        geometry.advance()
    assert geometry.due
    assert geometry.refresh(drawn.batch).accepted
    assert any(not factor.equal(before[name]) for name, factor in geometry.metric.named_factors().items())


def test_a_metric_that_is_not_finite_has_no_effect_to_report():
    geometry = flat_geometry(nn.Linear(4, 3), F.cross_entropy, structure="kfac", ema=0.0, lr=1e36, steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = geometry.refresh((torch.randn(8, 4), torch.randint(3, (8,))))
    assert not report.accepted
    assert math.isnan(report.change)
    assert math.isnan(report.gain)

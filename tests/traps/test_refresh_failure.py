"""A numerical failure in a refresh does not end the run: the old metric stays, and training continues."""

import warnings

import pytest
import torch

import llqr

from .training import assert_same_bits, batches, closure_of, mlp, quick_geometry, sgd, train, weights


def poisoned(batch):
    x, y = batch
    return x.clone().fill_(float("nan")), y


@pytest.mark.parametrize("structure", ["scalar", "diagonal", "kfac", "e-kfac", "diag-kfac", "dense", "kfac-psd"])
def test_the_old_metric_stays_and_training_continues(structure):
    model, data = mlp(), batches(8)
    geometry = quick_geometry(model, structure, every=2)
    opt = llqr.LLQRSAM(sgd(model), geometry, rho=0.05)
    train(opt, model, data[:2])
    kept = {name: factor.clone() for name, factor in geometry.metric.named_factors().items()}
    with pytest.warns(llqr.RefreshWarning, match=r"refresh at step 2: kept the old metric, because .*not finite"):
        opt.step(closure_of(opt, model, data[2]), batch=poisoned(data[2]))
    assert_same_bits(geometry.metric.named_factors(), kept)
    assert (geometry.refreshes, geometry.failures) == (2, 1)
    assert not geometry.due
    train(opt, model, data[3:])
    assert geometry.failures == 1
    assert any(not factor.equal(kept[name]) for name, factor in geometry.metric.named_factors().items())
    assert all(w.isfinite().all() for w in weights(model).values())


def test_a_first_refresh_that_fails_leaves_the_identity():
    data = batches(3)
    failing, plain = mlp(), mlp()
    opt = llqr.LLQRSAM(sgd(failing), quick_geometry(failing, every=100), rho=0.2)
    with pytest.warns(llqr.RefreshWarning):
        opt.step(closure_of(opt, failing, data[0]), batch=poisoned(data[0]))
    train(opt, failing, data[1:])
    train(llqr.SAM(sgd(plain), rho=0.2), plain, data)
    assert_same_bits(weights(failing), weights(plain))


def test_one_warning_then_an_error_after_enough_in_a_row():
    model, data = mlp(), batches(5)
    geometry = quick_geometry(model, every=1, max_failures=3)
    opt = llqr.LLQR(sgd(model), geometry)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for batch in data[:2]:
            opt.step(closure_of(opt, model, batch), batch=poisoned(batch))
        before = weights(model)
        with pytest.raises(llqr.RefreshError, match="3 in a row"):
            opt.step(closure_of(opt, model, data[2]), batch=poisoned(data[2]))
    assert len([w for w in seen if issubclass(w.category, llqr.RefreshWarning)]) == 1
    assert_same_bits(weights(model), before)


def test_a_success_resets_the_count():
    model, data = mlp(), batches(6)
    opt = llqr.LLQR(sgd(model), quick_geometry(model, every=1, max_failures=2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", llqr.RefreshWarning)
        for i, batch in enumerate(data):
            opt.step(closure_of(opt, model, batch), batch=batch if i % 2 else poisoned(batch))
    assert opt.geometry.failures == 3


def test_an_inner_loop_that_diverges_is_discarded():
    model, data = mlp(), batches(3)
    opt = llqr.LLQRSAM(sgd(model), quick_geometry(model, "kfac", lr=1e3, clip=1e9, steps=20, every=1), rho=0.05)
    with pytest.warns(llqr.RefreshWarning, match="kept the old metric"):
        losses = train(opt, model, data)
    assert opt.geometry.failures == 3
    assert all(loss.isfinite() for loss in losses)
    assert not opt.geometry.metric.learned


def test_a_wrong_batch_is_the_callers_error_and_leaves_no_trace():
    model, (batch,) = mlp(), batches(1)
    opt = llqr.LLQRSAM(sgd(model), quick_geometry(model), rho=0.05)
    before = weights(model)
    with pytest.raises(TypeError, match="batch"):
        opt.step(closure_of(opt, model, batch), batch=torch.ones(3))
    assert_same_bits(weights(model), before)
    assert model.training
    opt.step(closure_of(opt, model, batch), batch=batch)
    assert opt.geometry.metric.learned, "the refresh that failed is still due"

"""`first_step` and `second_step`, for loops that cannot use closures."""

import warnings

import pytest
import torch
from torch import nn

import llqr

from .training import assert_same_bits, batches, closure_of, cross_entropy, mlp, quick_geometry, sgd, train, weights

METHODS = {
    "sam": lambda model: llqr.SAM(sgd(model), rho=0.3, model=model),
    "asam": lambda model: llqr.ASAM(sgd(model), rho=0.3, model=model),
    "fishersam": lambda model: llqr.FisherSAM(sgd(model), rho=0.3, model=model),
    "fsam": lambda model: llqr.FriendlySAM(sgd(model), rho=0.3, model=model),
    "llqr+sam": lambda model: llqr.LLQRSAM(sgd(model), quick_geometry(model), rho=0.3),
    "warm-up": lambda model: llqr.SAM(sgd(model), rho=0.3, start_after=2, model=model),
    "sgdm": lambda model: llqr.Optimizer(sgd(model), model=model),
}


def normalised() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("zeroed", ["by argument", "by the loop", "by default"])
@pytest.mark.parametrize("method", METHODS)
def test_equals_the_closure_form(method, zeroed):
    """Statistics included, but not with a refresh, which reads them before the first pass here and after it there."""
    data = batches(4)
    make = mlp if method == "llqr+sam" else normalised
    called, looped = make(), make()
    train(METHODS[method](called), called, data)
    opt = METHODS[method](looped)
    for x, y in data:
        cross_entropy(looped(x), y).backward()
        if zeroed == "by default":  # a loop that only zeroes where every loop does
            opt.first_step(batch=(x, y))
        else:
            opt.first_step(batch=(x, y), zero_grad=zeroed == "by argument")
        if zeroed == "by the loop":
            opt.zero_grad()
        cross_entropy(looped(x), y).backward()
        opt.second_step(zero_grad=zeroed == "by argument")
        if zeroed != "by argument":
            opt.zero_grad()
    assert_same_bits(weights(looped), weights(called))


def test_calls_out_of_order_are_named():
    model, (batch,) = mlp(), batches(1)
    opt = llqr.SAM(sgd(model), rho=0.05)
    closure = closure_of(opt, model, batch)
    closure()
    with pytest.raises(RuntimeError, match="call first_step"):
        opt.second_step()
    opt.first_step()
    with pytest.raises(RuntimeError, match="called twice"):
        opt.first_step()
    opt.second_step()
    opt.step(closure)


@pytest.mark.parametrize("make", [llqr.LLQR, lambda *args: llqr.LLQRSAM(*args, 0.05, start_after=2)])
def test_a_metric_is_not_skipped_before_there_is_a_probe(make):
    """`first_step` is where a refresh takes place, also in a step of one pass."""
    model, (batch,) = mlp(), batches(1)
    opt = make(sgd(model), quick_geometry(model))
    closure_of(opt, model, batch)()
    with pytest.raises(RuntimeError, match="call first_step"):
        opt.second_step()
    opt.first_step(batch=batch, zero_grad=False)
    opt.second_step()
    assert (opt.steps, opt.geometry.refreshes) == (1, 1)


@pytest.mark.parametrize("finish", ["step()", "step(closure)", "step(nothing)"])
@pytest.mark.parametrize("method", METHODS)
def test_a_step_at_the_probe_is_the_second_step(method, finish):
    """Frameworks only call `step`, some of them always with a closure."""
    data = batches(4)
    make = mlp if method == "llqr+sam" else normalised
    called, looped = make(), make()
    train(METHODS[method](called), called, data)
    opt = METHODS[method](looped)
    for x, y in data:
        closure = closure_of(opt, looped, (x, y))
        closure()
        opt.first_step(batch=(x, y), zero_grad=True)
        if finish == "step(closure)":
            assert opt.step(closure) is not None
        else:
            closure()
            opt.step() if finish == "step()" else opt.step(lambda: None)
    assert opt.steps == 4
    assert_same_bits(weights(looped), weights(called))


def test_a_second_pass_that_fails_inside_the_step_abandons_it():
    model, (batch,) = normalised(), batches(1)
    opt = llqr.FriendlySAM(sgd(model), rho=0.5, model=model)
    closure = closure_of(opt, model, batch)
    closure()
    before = weights(model)
    opt.first_step()
    with pytest.raises(ZeroDivisionError):
        opt.step(lambda: (closure(), 1 / 0))
    assert_same_bits(weights(model), before)
    assert opt.probe.state_dict(list(model.parameters()))["mean"] == {}
    opt.step(closure)


def test_a_scheduler_knows_that_the_two_calls_are_a_step():
    model, (batch,) = mlp(), batches(1)
    opt = llqr.SAM(sgd(model), rho=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=1)
    closure = closure_of(opt, model, batch)
    closure()
    opt.first_step()
    closure()
    opt.second_step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()


def test_restore_abandons_a_step():
    model, (batch,) = normalised(), batches(1)
    opt = llqr.SAM(sgd(model), rho=0.5, model=model)
    closure = closure_of(opt, model, batch)
    closure()
    before = weights(model)
    opt.first_step()
    closure()
    assert not model[0].weight.equal(before["0.weight"])
    opt.restore()
    assert_same_bits(weights(model), before)
    opt.restore()
    assert_same_bits(weights(model), before)
    assert opt.steps == 0
    opt.step(closure)


def test_a_due_refresh_needs_a_batch():
    model, (batch,) = mlp(), batches(1)
    opt = llqr.LLQRSAM(sgd(model), quick_geometry(model), rho=0.05)
    closure_of(opt, model, batch)()
    with pytest.raises(ValueError, match=r"batch: a refresh is due"):
        opt.first_step()


def test_a_loss_with_statistics_may_be_given_beside_the_model():
    class Counting(nn.CrossEntropyLoss):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, outputs, targets):
            self.seen += len(targets)
            return super().forward(outputs, targets)

    model, loss_fn, ((x, y),) = mlp(), Counting(), batches(1)
    opt = llqr.SAM(sgd(model), rho=0.05, model=nn.ModuleList([model, loss_fn]))
    loss_fn(model(x), y).backward()
    opt.first_step()
    loss_fn(model(x), y).backward()
    opt.second_step()
    assert loss_fn.seen == len(y)

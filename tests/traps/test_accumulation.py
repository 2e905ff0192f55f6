"""Gradient accumulation: the closure runs through all micro-batches, and the result equals that of the full batch."""

import pytest
import torch

import llqr

from .training import assert_same_bits, batches, closure_of, cross_entropy, mlp, quick_geometry, sgd, weights

METHODS = {
    "sam": lambda model, **_: llqr.SAM(sgd(model), rho=0.3),
    "asam": lambda model, **_: llqr.ASAM(sgd(model), rho=0.3),
    "fishersam": lambda model, **_: llqr.FisherSAM(sgd(model), rho=0.3),
    "fsam": lambda model, **_: llqr.FriendlySAM(sgd(model), rho=0.3),
    "llqr+sam": lambda model, **kw: llqr.LLQRSAM(sgd(model), quick_geometry(model, "e-kfac", **kw), rho=0.3),
}


@pytest.mark.parametrize("method", METHODS)
def test_micro_batches_in_the_closure_equal_the_full_batch(method):
    data = batches(4, size=12, dtype=torch.float64)
    full, micro = mlp(torch.float64), mlp(torch.float64)
    whole, pieces = METHODS[method](full), METHODS[method](micro, micro_batch=4)
    for batch in data:
        expected = whole.step(closure_of(whole, full, batch), batch=batch)

        def closure(batch=batch):
            pieces.zero_grad()
            total = 0.0
            for x, y in zip(batch[0].split(4), batch[1].split(4), strict=True):
                loss = cross_entropy(micro(x), y) / 3
                loss.backward()
                total += loss.detach()
            return total

        torch.testing.assert_close(pieces.step(closure, batch=batch), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(weights(micro), weights(full), rtol=1e-9, atol=1e-11)


def test_gradients_accumulated_before_a_step_without_closure():
    """Without a probe the loop accumulates outside the step, and the wrapper must not touch these gradients."""
    data = batches(3, size=12, dtype=torch.float64)
    full, micro = mlp(torch.float64), mlp(torch.float64)
    whole, pieces = llqr.LLQR(sgd(full), quick_geometry(full)), llqr.LLQR(sgd(micro), quick_geometry(micro))
    for batch in data:
        whole.step(closure_of(whole, full, batch), batch=batch)
        pieces.zero_grad()
        for x, y in zip(batch[0].split(4), batch[1].split(4), strict=True):
            (cross_entropy(micro(x), y) / 3).backward()
        pieces.step(batch=batch)
    torch.testing.assert_close(weights(micro), weights(full), rtol=1e-9, atol=1e-11)


def outside_and_inside(model, opt, batch, zeroes=False):
    """Backward passes of all micro-batches but the last, and a closure for that one, as frameworks accumulate."""
    pieces = list(zip(batch[0].split(4), batch[1].split(4), strict=True))
    for x, y in pieces[:-1]:
        (cross_entropy(model(x), y) / len(pieces)).backward()

    def closure():
        if zeroes:
            opt.zero_grad()
        loss = cross_entropy(model(pieces[-1][0]), pieces[-1][1]) / len(pieces)
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("zeroing", [True, False])
def test_without_a_probe_the_closure_adds_to_gradients_from_outside(zeroing):
    data = batches(3, size=12, dtype=torch.float64)
    full, micro = mlp(torch.float64), mlp(torch.float64)
    whole, pieces = llqr.LLQR(sgd(full), quick_geometry(full)), llqr.LLQR(sgd(micro), quick_geometry(micro))
    for batch in data:
        whole.step(closure_of(whole, full, batch), batch=batch)
        pieces.zero_grad(set_to_none=zeroing)
        pieces.step(outside_and_inside(micro, pieces, batch), batch=batch)
    torch.testing.assert_close(weights(micro), weights(full), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("method", ["sam", "llqr+sam"])
def test_with_a_probe_they_are_refused_and_nothing_moves(method):
    """The second pass would need them at the probe."""
    model, (batch,) = mlp(), batches(1, size=12)
    opt = METHODS[method](model)
    before = weights(model)
    with pytest.raises(RuntimeError, match=r"step: there are gradients of a backward pass outside the closure"):
        opt.step(outside_and_inside(model, opt, batch), batch=batch)
    assert_same_bits(weights(model), before)
    assert opt.steps == 0


@pytest.mark.parametrize("start_after", [0, 10])
def test_the_peers_idiom_is_refused_too(start_after):
    """A backward pass, then `step(closure)` with a closure that does not zero: half of it would be SAM."""
    model, data = mlp(), batches(2)
    opt = llqr.SAM(sgd(model), rho=0.05, start_after=start_after)

    def closure(batch):
        loss = cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        return loss

    closure(data[0])
    with pytest.raises(RuntimeError, match="outside the closure"):
        opt.step(lambda: closure(data[0]))
    opt.step(lambda: closure(data[0]))
    closure(data[1])
    with pytest.raises(RuntimeError, match="outside the closure"):
        opt.step(lambda: closure(data[1]))


def test_a_closure_that_computes_nothing_is_refused():
    """A framework's closure that does nothing, after the only backward pass."""
    model, (batch,) = mlp(), batches(1)
    opt = llqr.SAM(sgd(model), rho=0.05)
    cross_entropy(model(batch[0]), batch[1]).backward()
    with pytest.raises(RuntimeError, match="outside the closure"):
        opt.step(lambda: None)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("zeroing", ["opt", "base", "model"])
def test_a_closure_that_zeroes_does_not_care(zeroing, set_to_none):
    data = batches(3)
    clean, dirty = mlp(), mlp()
    opt, other = llqr.SAM(sgd(clean), rho=0.05), llqr.SAM(sgd(dirty), rho=0.05)
    for batch in data:
        opt.step(closure_of(opt, clean, batch))

        def closure(batch=batch):
            {"opt": other, "base": other.base, "model": dirty}[zeroing].zero_grad(set_to_none)
            loss = cross_entropy(dirty(batch[0]), batch[1])
            loss.backward()
            return loss

        cross_entropy(dirty(batch[0]), batch[1]).backward()
        other.step(closure)
    assert_same_bits(weights(dirty), weights(clean))


@pytest.mark.parametrize("zeroing", ["opt", "base", "model"])
def test_gradients_zeroed_in_place_between_the_steps_are_nobodys(zeroing):
    data = batches(3)
    clean, zeroed = mlp(), mlp()
    opt, other = llqr.SAM(sgd(clean), rho=0.05), llqr.SAM(sgd(zeroed), rho=0.05)
    for batch in data:
        opt.step(closure_of(opt, clean, batch))
        {"opt": other, "base": other.base, "model": zeroed}[zeroing].zero_grad(set_to_none=False)

        def closure(batch=batch):
            loss = cross_entropy(zeroed(batch[0]), batch[1])
            loss.backward()
            return loss

        other.step(closure)
    assert_same_bits(weights(zeroed), weights(clean))


@pytest.mark.parametrize("failing_pass", [1, 2])
def test_gradients_of_a_step_that_failed_are_cleared_too(failing_pass):
    data = batches(2)
    clean, failing = mlp(), mlp()
    opt, other = llqr.SAM(sgd(clean), rho=0.05), llqr.SAM(sgd(failing), rho=0.05)
    passes = []

    def closure(batch):
        passes.append(1)
        loss = cross_entropy(failing(batch[0]), batch[1])
        loss.backward()
        if len(passes) == failing_pass:
            raise ArithmeticError
        return loss

    with pytest.raises(ArithmeticError):
        other.step(lambda: closure(data[0]))
    opt.step(closure_of(opt, clean, data[1]))
    other.step(lambda: closure(data[1]))
    assert_same_bits(weights(failing), weights(clean))

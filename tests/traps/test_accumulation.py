"""Gradient accumulation: the closure runs through all micro-batches, and the result equals that of the full batch."""

import pytest
import torch

import llqr

from .training import batches, closure_of, cross_entropy, mlp, quick_geometry, sgd, weights

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

"""Dropout: by default both passes of a step see the same masks, and the random stream continues as after one pass."""

import random

import pytest
import torch
from torch import nn

import llqr

from .training import assert_same_bits, batches, closure_of, mlp, quick_geometry, sgd, weights


def with_dropout() -> nn.Sequential:
    model = mlp()
    return nn.Sequential(model[0], model[1], nn.Dropout(0.5), model[2])


def masks_of_one_step(opt: llqr.Optimizer, model: nn.Sequential, batch) -> list[torch.Tensor]:
    seen = []

    def note(module, inputs, output):
        if module.training:  # a refresh runs in eval mode
            seen.append(output == 0)

    handle = model[2].register_forward_hook(note)
    torch.manual_seed(3)
    opt.step(closure_of(opt, model, batch), batch=batch)
    handle.remove()
    assert len(seen) == 2
    return seen


def test_both_passes_see_the_same_mask():
    model, (batch,) = with_dropout(), batches(1)
    first, second = masks_of_one_step(llqr.SAM(sgd(model), rho=0.05), model, batch)
    assert first.any()
    assert first.equal(second)


def test_masks_differ_when_asked_to():
    model, (batch,) = with_dropout(), batches(1)
    first, second = masks_of_one_step(llqr.SAM(sgd(model), rho=0.05, same_dropout=False), model, batch)
    assert not first.equal(second)


@pytest.mark.parametrize("learned", [False, True])
def test_the_random_stream_continues_as_after_one_pass(learned):
    """So that a SAM run draws the same data order and augmentation as its base optimizer's run."""
    model, (batch,) = with_dropout(), batches(1)
    geometry = quick_geometry(model, every=1) if learned else None
    opt = llqr.SAM(sgd(model), rho=0.05, geometry=geometry)
    torch.manual_seed(3)
    closure_of(opt, model, batch)()
    expected = torch.get_rng_state()
    masks_of_one_step(opt, model, batch)
    assert torch.get_rng_state().equal(expected)


def test_successive_steps_see_different_masks():
    model, (batch,) = with_dropout(), batches(1)
    opt = llqr.SAM(sgd(model), rho=0.05)
    seen = []
    model[2].register_forward_hook(lambda module, inputs, output: seen.append(output == 0))
    for _ in range(2):
        opt.step(closure_of(opt, model, batch))
    assert not seen[0].equal(seen[2])


def test_the_probe_at_radius_zero_is_the_base_optimizer_under_dropout():
    data = batches(4)
    plain, probed = with_dropout(), with_dropout()
    base, opt = sgd(plain), llqr.SAM(sgd(probed), rho=0.0)
    torch.manual_seed(5)
    for batch in data:
        closure_of(base, plain, batch)()
        base.step()
    torch.manual_seed(5)
    for batch in data:
        opt.step(closure_of(opt, probed, batch))
    assert_same_bits(weights(probed), weights(plain))


@pytest.mark.parametrize("draw", [random.random, lambda: torch.rand(())])
def test_numbers_that_only_the_first_pass_draws_are_not_drawn_again(draw):
    model, (batch,), drawn = mlp(), batches(1), []
    opt = llqr.SAM(sgd(model), rho=0.05)
    for _ in range(3):
        noise: list[float] = []

        def closure(noise=noise):
            if not noise:
                noise.append(float(draw()))
            return closure_of(opt, model, (batch[0] + noise[0], batch[1]))()

        opt.step(closure)
        drawn += noise
    assert len(set(drawn)) == 3

"""Another optimizer that steps inside the backward pass: the second pass would step it again."""

import pytest
import torch
from torch import nn

import llqr

from .training import assert_same_bits, batches, closure_of, cross_entropy, mlp, sgd, weights


def stepping_in_backward(model: nn.Module) -> list[torch.optim.Optimizer]:
    """One optimizer for every parameter of the first layer, as `_apply_optimizer_in_backward` makes them."""
    others = []
    for parameter in model[0].parameters():
        others.append(torch.optim.SGD([parameter], lr=0.1))
        parameter.register_post_accumulate_grad_hook(lambda _, other=others[-1]: other.step())
    return others


def test_it_is_refused_before_anything_has_moved():
    model, (batch,) = mlp(), batches(1)
    others = stepping_in_backward(model)
    opt, before = llqr.SAM(sgd(model[2])), weights(model)
    with pytest.raises(RuntimeError, match=r"^closure: a hook of its backward pass steps another optimizer \(SGD\)"):
        opt.step(closure_of(opt, model, batch))
    assert_same_bits(weights(model), before)
    others[0].step()  # as before, outside of a step
    cross_entropy(model(batch[0]), batch[1]).backward()


def test_it_steps_once_where_there_is_one_pass():
    model, (batch,) = mlp(), batches(1)
    stepping_in_backward(model)
    before = model[0].weight.detach().clone()
    for opt in (llqr.Optimizer(sgd(model[2])), llqr.SAM(sgd(model[2]), start_after=1)):
        with torch.no_grad():
            model[0].weight.copy_(before)
        opt.step(closure_of(opt, model, batch))
        torch.testing.assert_close(model[0].weight.detach(), before - 0.1 * model[0].weight.grad)
        model.zero_grad()


def test_a_closure_that_steps_another_optimizer_by_itself_is_not_refused():
    """It does so twice, like everything else that it does."""
    model, (batch,) = mlp(), batches(1)
    opt, other = llqr.SAM(sgd(model[2])), sgd(model[0])
    steps = []
    other.register_step_post_hook(lambda *_: steps.append(1))

    def closure():
        loss = closure_of(opt, model, batch)()
        other.step()
        return loss

    opt.step(closure)
    assert len(steps) == 2

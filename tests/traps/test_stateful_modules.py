"""Modules that go on from a state that they keep as an attribute: both passes of a step start from the same one."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import llqr
from llqr.integrations.passes import Passes

from .training import assert_same_bits, batches, closure_of, cross_entropy, mlp, quick_geometry, sgd, weights


class Carried(nn.Module):
    """A recurrent network that carries its state and a count from batch to batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.calls = kind, 0
        self.cell, self.head = nn.RNNCell(5, 6), nn.Linear(6, 3)
        if kind == "buffer":
            self.register_buffer("state", None)
        elif kind == "zeros":
            self.state = torch.zeros(16, 6)
        elif kind == "none":
            self.state = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = getattr(self, "state", None)
        h = self.cell(x, state[0] if isinstance(state, tuple) else state)
        self.state = (h.detach(), 1) if self.kind == "tuple" else h.detach()
        self.calls += 1
        self.seen = h  # with its graph, so that it is no state
        return self.head(h)


KINDS = ["zeros", "none", "missing", "tuple", "buffer"]


def state_of(model: Carried) -> torch.Tensor:
    return model.state[0] if model.kind == "tuple" else model.state


def by_hand(model: Carried, batch, rho: float, lr: float) -> None:
    """A step of SAM, whose second pass is that of a copy which has not made the first."""
    there = copy.deepcopy(model)
    parameters = list(model.parameters())
    g = torch.autograd.grad(cross_entropy(model(batch[0]), batch[1]), parameters)
    norm = torch.sqrt(sum(part.square().sum() for part in g) + 1e-12)
    with torch.no_grad():
        for p, part in zip(there.parameters(), g, strict=True):
            p += rho * part / norm
    g = torch.autograd.grad(cross_entropy(there(batch[0]), batch[1]), list(there.parameters()))
    model.seen = None
    with torch.no_grad():
        for p, part in zip(parameters, g, strict=True):
            p -= lr * part


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_both_passes_start_from_the_same_state(kind, given):
    model, reference = Carried(kind), Carried(kind)
    opt = llqr.SAM(sgd(model, lr=0.1, momentum=0), rho=0.5, model=model if given else None)
    for batch in batches(3):
        opt.step(closure_of(opt, model, batch))
        by_hand(reference, batch, 0.5, 0.1)
        torch.testing.assert_close(weights(model), weights(reference))
        torch.testing.assert_close(state_of(model), state_of(reference))
    assert model.calls == 6


def test_a_copy_of_model_and_optimizer():
    model, data = Carried("zeros"), batches(3)
    opt = llqr.SAM(sgd(model), rho=0.5)
    opt.step(closure_of(opt, model, data[0]))
    model.seen = None  # torch copies no tensors with a graph
    twin, other = copy.deepcopy((model, opt))
    for batch in data[1:]:
        opt.step(closure_of(opt, model, batch))
        other.step(closure_of(other, twin, batch))
    assert_same_bits(weights(twin), weights(model))
    assert twin.state.equal(model.state)


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_passes(kind):
    """Of two micro-batches, which go on from one another."""
    model, reference = Carried(kind), Carried(kind)
    opt, other = (llqr.SAM(sgd(one), rho=0.5) for one in (model, reference))
    passes, data = Passes(opt), batches(2)

    def forward_backward(x, y):
        cross_entropy(model(x), y).backward()

    def closure():
        other.zero_grad()
        losses = [cross_entropy(reference(x), y) for x, y in data]
        sum(losses).backward()
        return losses[0]

    for _ in range(2):
        for batch in data:
            passes.record(forward_backward, *batch)
            forward_backward(*batch)
        passes.repeat_at_probe()
        opt.step()
        opt.zero_grad()
        other.step(closure)
        torch.testing.assert_close(weights(model), weights(reference))
        torch.testing.assert_close(state_of(model), state_of(reference))


def test_what_a_loop_assigns_between_two_calls_stays():
    model, (batch,) = Carried("zeros"), batches(1)
    opt = llqr.SAM(sgd(model), rho=0.5)
    cross_entropy(model(batch[0]), batch[1]).backward()
    opt.first_step()
    cross_entropy(model(batch[0]), batch[1]).backward()
    model.state = mine = torch.zeros(16, 6)
    opt.second_step()
    assert model.state is mine


def test_the_state_of_the_second_pass_when_asked_for():
    model, reference, (batch,) = Carried("zeros"), Carried("zeros"), batches(1)
    opt = llqr.SAM(sgd(model), rho=0.5, buffers="probe")
    states = []

    def closure():
        loss = closure_of(opt, model, batch)()
        states.append(model.state)
        return loss

    opt.step(closure)
    other = llqr.SAM(sgd(reference), rho=0.5)
    other.step(closure_of(other, reference, batch))
    assert_same_bits({n: p.detach() for n, p in model.named_parameters()}, weights(reference))
    assert model.state is states[1]


def test_a_failed_step_leaves_the_state_of_the_first_pass():
    model, (batch,) = Carried("zeros"), batches(1)
    opt, states = llqr.SAM(sgd(model), rho=0.5), []

    def closure():
        loss = closure_of(opt, model, batch)()
        states.append(model.state)
        if len(states) == 2:
            raise ArithmeticError
        return loss

    with pytest.raises(ArithmeticError):
        opt.step(closure)
    assert model.state is states[0]


class SetUpLater(nn.Module):
    """Makes what it needs when it is called for the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.ready, self.frozen, self.times = nn.Linear(5, 3), False, None, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            self.frozen, self.ready = nn.Linear(3, 3).requires_grad_(False), True
            self.times += 1
        return self.frozen(self.body(x))


def test_what_a_module_sets_up_in_the_first_pass_is_there_in_the_second():
    model = SetUpLater()
    opt = llqr.SAM(sgd(model), rho=0.5)
    for batch in batches(2):
        opt.step(closure_of(opt, model, batch))
    assert isinstance(model.frozen, nn.Linear)
    assert (model.ready, model.times) == (True, 1)


def test_the_mode_stays_as_the_loop_has_set_it():
    model, (batch,) = Carried("zeros"), batches(1)
    opt = llqr.SAM(sgd(model), rho=0.5)
    cross_entropy(model(batch[0]), batch[1]).backward()
    opt.first_step()
    cross_entropy(model(batch[0]), batch[1]).backward()
    model.eval()
    opt.second_step()
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("method", ["sam", "llqr"])
def test_parametrized_weights_that_a_caller_lets_torch_keep(method):
    """Inside `cached`, a weight is computed once: neither of a refresh nor of the first pass may it be used again."""
    twins = [mlp(), mlp()]
    for model, kept in zip(twins, (parametrize.cached, nullcontext), strict=True):
        parametrizations.weight_norm(model[0])
        geometry = quick_geometry(model, every=1)
        opt = llqr.SAM(sgd(model), rho=0.5) if method == "sam" else llqr.LLQR(sgd(model), geometry)
        for batch in batches(2):
            with kept():
                opt.step(closure_of(opt, model, batch), batch=batch)
    assert_same_bits(*map(weights, twins))

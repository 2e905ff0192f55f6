"""Normalisation statistics are updated once per step, by the first pass, whatever the class that keeps them."""

import copy

import pytest
import torch
from torch import nn

import llqr

from .training import assert_same_bits, batches, closure_of, quick_geometry, sgd, train, weights


class InPlaceNorm(nn.Module):
    """Not a BatchNorm: it updates its statistics in place, in buffers with its own names."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("mu", torch.zeros(features))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=False)
        self.gain = nn.Parameter(torch.ones(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mu.lerp_(x.detach().mean(0), 0.1)
            self.calls += 1
        return (x - self.mu) * self.gain


class ReplacingNorm(InPlaceNorm):
    """Replaces its buffers by new tensors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mu = 0.9 * self.mu + 0.1 * x.detach().mean(0)
            self.calls = self.calls + 1
        return (x - self.mu) * self.gain


NORMS = [nn.BatchNorm1d, InPlaceNorm, ReplacingNorm]


def network(norm: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), norm(8), nn.Tanh(), nn.Linear(8, 3))


def buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def forward_only(model: nn.Module, batch) -> dict[str, torch.Tensor]:
    """The buffers after one pass at the present weights, as they must be after a step."""
    before = weights(model)
    others = {name: b.clone() for name, b in model.named_buffers() if name not in before}
    with torch.no_grad():
        model(batch[0])
    after = buffers(model)
    model.load_state_dict(before)
    for name, buffer in others.items():
        model.get_buffer(name).copy_(buffer)
    return after


@pytest.mark.parametrize("norm", NORMS)
def test_statistics_are_updated_once_per_step(norm):
    model = network(norm)
    opt = llqr.SAM(sgd(model), rho=0.5, model=model)
    for batch in batches(4):
        expected = forward_only(model, batch)
        opt.step(closure_of(opt, model, batch))
        assert_same_bits(buffers(model), expected)


@pytest.mark.parametrize("norm", NORMS)
def test_a_refresh_leaves_no_trace(norm):
    model, (batch,) = network(norm), batches(1)
    geometry = quick_geometry(model, every=1)
    opt = llqr.LLQRSAM(sgd(model), geometry, rho=0.5)
    before = weights(model)
    geometry.refresh(batch)
    assert_same_bits(weights(model), before)
    assert model.training
    expected = forward_only(model, batch)
    train(opt, model, [batch])
    assert_same_bits(buffers(model), expected)


@pytest.mark.parametrize("norm", NORMS)
def test_a_closure_that_raises_in_the_second_pass_leaves_the_statistics_of_the_first(norm):
    model, (batch,) = network(norm), batches(1)
    opt = llqr.SAM(sgd(model), rho=0.5, model=model)
    expected = forward_only(model, batch)
    passes = []

    def closure():
        loss = closure_of(opt, model, batch)()
        passes.append(loss)
        if len(passes) == 2:
            raise KeyboardInterrupt
        return loss

    with pytest.raises(KeyboardInterrupt):
        opt.step(closure)
    assert_same_bits(buffers(model), expected)


@pytest.mark.parametrize("norm", NORMS)
def test_statistics_of_the_probe_are_those_of_one_pass_at_the_probe(norm):
    model, (batch,) = network(norm), batches(1)
    opt = llqr.SAM(sgd(model), rho=0.5, model=model, buffers="probe")
    at_probe = copy.deepcopy(model)
    seen = []

    def closure():
        if seen:
            with torch.no_grad():
                for one, other in zip(at_probe.parameters(), model.parameters(), strict=True):
                    one.copy_(other)
        loss = closure_of(opt, model, batch)()
        seen.append(buffers(model))
        return loss

    opt.step(closure)
    at_probe(batch[0])
    assert_same_bits(buffers(model), buffers(at_probe))
    assert any(not buffer.equal(seen[0][name]) for name, buffer in model.named_buffers())  # and not the first pass's


@pytest.mark.parametrize("norm", NORMS)
def test_statistics_of_the_probe_in_the_two_call_form_are_as_the_second_pass_left_them(norm):
    model, (batch,) = network(norm), batches(1)
    opt = llqr.SAM(sgd(model), rho=0.5, model=model, buffers="probe")
    closure = closure_of(opt, model, batch)
    closure()
    opt.first_step()
    closure()
    expected = buffers(model)
    opt.second_step()
    assert_same_bits(buffers(model), expected)


def test_without_a_second_pass_no_trace_of_the_first_is_left():
    model, (batch,) = network(nn.BatchNorm1d), batches(1)
    opt = llqr.SAM(sgd(model), rho=0.05, model=model, buffers="probe")
    expected = buffers(model)

    def closure():
        loss = closure_of(opt, model, batch)()
        opt.zero_grad()
        return loss

    with pytest.warns(UserWarning, match="gradient"):
        opt.step(closure)
    assert_same_bits(buffers(model), expected)


def test_unknown_buffers_are_refused():
    with pytest.raises(ValueError, match="buffers: expected 'centre' or 'probe', got 'both'"):
        llqr.SAM(sgd(network(nn.BatchNorm1d)), rho=0.05, buffers="both")


def test_a_part_that_a_model_gets_later_is_protected_too():
    model, (batch,) = network(nn.BatchNorm1d), batches(1)
    opt = llqr.SAM(sgd(model), rho=0.05, model=model)
    opt.step(closure_of(opt, model, batch))
    model.append(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    opt.add_param_group({"params": list(model[-1].parameters())})
    opt.step(closure_of(opt, model, batch))
    assert (model[1].num_batches_tracked, model[-1][1].num_batches_tracked) == (2, 1)


def test_statistics_without_a_shape_before_the_first_step():
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.LazyLinear(3))
    opt = llqr.SAM(sgd(model), rho=0.05, model=model)
    train(opt, model, batches(2))
    assert model[1].num_batches_tracked == 2


def test_without_a_model_both_passes_write():
    model = network(nn.BatchNorm1d)
    train(llqr.SAM(sgd(model), rho=0.05), model, batches(3))
    assert model[1].num_batches_tracked == 6


def test_a_warm_up_updates_statistics_as_the_base_would():
    model = network(nn.BatchNorm1d)
    opt = llqr.SAM(sgd(model), rho=0.05, start_after=2, model=model)
    train(opt, model, batches(4))
    assert model[1].num_batches_tracked == 4


def test_frozen_statistics_stay_frozen():
    model = network(nn.BatchNorm1d)
    train(llqr.SAM(sgd(model), rho=0.05, model=model), model, batches(1))
    model[1].eval()
    before = buffers(model)
    opt = llqr.SAM(sgd(model), rho=0.05, model=model)
    train(opt, model, batches(2))
    assert_same_bits(buffers(model), before)
    assert not model[1].training
    assert model[0].training


def an_inference_tensor() -> torch.Tensor:
    """What a module has that makes a table while it is evaluated in inference mode."""
    with torch.inference_mode():
        return torch.ones(3)


@pytest.mark.parametrize(
    "constant",
    [
        lambda: torch.ones(3, 1).expand(3, 4),
        an_inference_tensor,
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.ones(2, dtype=torch.complex64),
        lambda: torch.zeros(0),
    ],
    ids=["expanded", "inference", "sparse", "csr", "complex", "empty"],
)
def test_constants_of_any_kind_beside_the_statistics(constant):
    """Some of them cannot be written to, and need not be put back."""
    model = network(nn.BatchNorm1d)
    model.register_buffer("constant", constant())
    opt = llqr.SAM(sgd(model), rho=0.05, model=model)
    train(opt, model, batches(3))
    assert model[1].num_batches_tracked == 3


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_the_statistics_of_a_scripted_network():
    """Its buffers are not in a dictionary."""
    eager, data = network(nn.BatchNorm1d), batches(3)
    scripted = torch.jit.script(network(nn.BatchNorm1d))
    for model in (eager, scripted):
        train(llqr.SAM(sgd(model), rho=0.05, model=model), model, data)
    assert int(scripted.state_dict()["1.num_batches_tracked"]) == 3
    torch.testing.assert_close(weights(scripted), weights(eager))  # scripted code is fused


def test_a_copy_between_the_two_calls_restores_the_statistics_too():
    """In a step without a probe, where copying is allowed: the weights are at the centre."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)), torch.randn(8, 5)
    opt = llqr.SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.05, start_after=10, model=model)
    model(x).square().sum().backward()
    opt.first_step()
    model, opt = copy.deepcopy((model, opt))
    before = model[1].running_mean.clone()
    model(x).square().sum().backward()
    opt.second_step()
    assert model[1].running_mean.equal(before)

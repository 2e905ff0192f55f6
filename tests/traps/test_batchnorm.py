"""Normalisation statistics are updated once per step, by the first pass, whatever the class that keeps them."""

import copy
import gc
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import llqr
from llqr.integrations.passes import Passes

from .training import assert_same_bits, batches, closure_of, cross_entropy, quick_geometry, sgd, train, weights


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


@pytest.mark.parametrize("given", [True, False], ids=["given", "found"])
@pytest.mark.parametrize("norm", NORMS)
def test_statistics_are_updated_once_per_step(norm, given):
    model = network(norm)
    opt = llqr.SAM(sgd(model), rho=0.5, model=model if given else None)
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
    opt = llqr.SAM(sgd(model), rho=0.5)
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


@pytest.mark.parametrize("given", [True, False], ids=["given", "found"])
@pytest.mark.parametrize("norm", NORMS)
def test_statistics_of_the_probe_are_those_of_one_pass_at_the_probe(norm, given):
    model, (batch,) = network(norm), batches(1)
    opt = llqr.SAM(sgd(model), rho=0.5, model=model if given else None, buffers="probe")
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
    opt = llqr.SAM(sgd(model), rho=0.5, buffers="probe")
    closure = closure_of(opt, model, batch)
    closure()
    opt.first_step()
    closure()
    expected = buffers(model)
    opt.second_step()
    assert_same_bits(buffers(model), expected)


def test_without_a_second_pass_no_trace_of_the_first_is_left():
    model, (batch,) = network(nn.BatchNorm1d), batches(1)
    opt = llqr.SAM(sgd(model), buffers="probe")
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
        llqr.SAM(sgd(network(nn.BatchNorm1d)), buffers="both")


def test_the_model_is_found_even_if_the_closure_calls_only_its_parts():
    encoder, head = network(nn.BatchNorm1d), nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    opt = llqr.SAM(torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.1), rho=0.5)
    for steps, (x, y) in enumerate(batches(2), start=1):

        def closure(x=x, y=y):
            opt.zero_grad()
            loss = cross_entropy(head(encoder(x)), y)
            loss.backward()
            return loss

        opt.step(closure)
        assert encoder[1].num_batches_tracked == head[0].num_batches_tracked == steps


class MovingCentre(nn.Module):
    """A loss without parameters that keeps a moving average, as in self-distillation."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.centre.lerp_(outputs.detach().mean(0), 0.1)
        return cross_entropy(outputs - self.centre, targets)


@pytest.mark.parametrize("given", [None, "model", "geometry"])
def test_a_model_that_cannot_be_found_is_asked_for(given):
    """Some loops hide all objects from Python's garbage collector, and with it from us, to save its time."""
    model, (batch,) = network(nn.BatchNorm1d), batches(1)
    known = {"model": {"model": model}, "geometry": {"geometry": quick_geometry(model)}}
    opt = llqr.SAM(sgd(model), rho=0.5, **known.get(given, {}))
    frozen = gc.get_freeze_count()
    gc.freeze()
    try:
        assert gc.get_freeze_count() > frozen
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(opt, model, [batch, batch])
    finally:
        gc.unfreeze()
        if frozen:
            gc.freeze()  # as it was for the other tests
    assert [str(one.message).partition(";")[0] for one in caught] == (
        [] if given else ["model: gc.freeze() hides modules"]
    )
    assert int(model[1].num_batches_tracked) == (2 if given else 4)


@pytest.mark.parametrize("learned", [False, True])
def test_a_loss_that_keeps_statistics_is_found_too(learned):
    model, criterion = network(nn.BatchNorm1d), MovingCentre()
    opt = llqr.SAM(sgd(model), rho=0.5, geometry=quick_geometry(model) if learned else None)
    for x, y in batches(3):
        seen = []

        def closure(x=x, y=y, seen=seen):
            opt.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            seen.append(criterion.centre.clone())
            return loss

        opt.step(closure, batch=(x, y))
        assert criterion.centre.equal(seen[0])
        assert not criterion.centre.equal(seen[1])


def test_the_model_is_found_in_the_two_call_form_and_among_added_parameters():
    model, head, (batch,) = network(nn.BatchNorm1d), nn.Sequential(nn.BatchNorm1d(3)), batches(1)
    opt = llqr.SAM(sgd(model))
    closure = closure_of(opt, model, batch)
    closure()
    opt.first_step()
    closure()
    opt.second_step()
    assert model[1].num_batches_tracked == 1
    opt.add_param_group({"params": list(head.parameters())})
    opt.step(closure_of(opt, lambda x: head(model(x)), batch))
    assert (model[1].num_batches_tracked, head[0].num_batches_tracked) == (2, 1)


@pytest.mark.parametrize("past_the_wrapper", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_a_part_that_a_model_gets_later_is_protected_too(given, past_the_wrapper):
    model, (batch,) = network(nn.BatchNorm1d), batches(1)
    opt = llqr.SAM(sgd(model), model=model if given else None)
    opt.step(closure_of(opt, model, batch))
    model.append(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    (opt.base if past_the_wrapper else opt).add_param_group({"params": list(model[-1].parameters())})
    opt.step(closure_of(opt, model, batch))
    assert (model[1].num_batches_tracked, model[-1][1].num_batches_tracked) == (2, 1)


@pytest.mark.parametrize("given", [False, True])
def test_a_part_that_is_exchanged_for_another_of_its_size_is_protected_too(given):
    model, (batch,) = network(nn.BatchNorm1d), batches(1)
    model.append(nn.BatchNorm1d(3))
    opt = llqr.SAM(sgd(model), model=model if given else None)
    opt.step(closure_of(opt, model, batch))
    model[-1] = nn.BatchNorm1d(3)
    opt.param_groups[0]["params"][-2:] = model[-1].parameters()
    opt.step(closure_of(opt, model, batch))
    assert (model[1].num_batches_tracked, model[-1].num_batches_tracked) == (2, 1)


@pytest.mark.parametrize("given", [False, True])
def test_statistics_without_a_shape_before_the_first_step(given):
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.LazyLinear(3))
    opt = llqr.SAM(sgd(model), model=model if given else None)
    train(opt, model, batches(2))
    assert model[1].num_batches_tracked == 2


def test_layers_of_two_models_with_the_same_names_are_not_mixed_up():
    """Per-layer norms: each of the two layers called "0" moves by rho / sqrt(2)."""
    encoder, head = nn.Sequential(nn.Linear(5, 4)).double(), nn.Sequential(nn.Linear(4, 3)).double()
    (batch,) = batches(1, dtype=torch.float64)
    opt = llqr.SAM(
        torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.1), rho=0.3, norm="layer-euclidean"
    )
    closure_of(opt, lambda x: head(encoder(x)), batch)()
    before = [weights(encoder), weights(head)]
    opt.first_step()
    for model, start in zip((encoder, head), before, strict=True):
        moved = torch.cat([(p.detach() - start[name]).flatten() for name, p in model.named_parameters()])
        assert moved.norm().item() == pytest.approx(0.3 / 2**0.5, rel=1e-6)


def test_a_warm_up_updates_statistics_as_the_base_would():
    model = network(nn.BatchNorm1d)
    opt = llqr.SAM(sgd(model), start_after=2)
    train(opt, model, batches(4))
    assert model[1].num_batches_tracked == 4


def test_frozen_statistics_stay_frozen():
    model = network(nn.BatchNorm1d)
    train(llqr.SAM(sgd(model)), model, batches(1))
    model[1].eval()
    before = buffers(model)
    opt = llqr.SAM(sgd(model))
    train(opt, model, batches(2))
    assert_same_bits(buffers(model), before)
    assert not model[1].training
    assert model[0].training


def test_a_network_that_another_thread_trains_is_not_adopted():
    """Its statistics must not be rolled back with ours."""
    ours, theirs = network(nn.BatchNorm1d), network(nn.BatchNorm1d)
    opt, (batch,) = llqr.SAM(sgd(ours), rho=0.5), batches(1)
    with ThreadPoolExecutor(1) as other_thread:

        def closure():
            other_thread.submit(theirs, batch[0]).result()
            return closure_of(opt, ours, batch)()

        opt.step(closure)
        opt.step(closure)
    assert theirs[1].num_batches_tracked == 4
    assert ours[1].num_batches_tracked == 2


@pytest.mark.parametrize("idle_threads", [0, 1])
def test_a_network_whose_outputs_are_detached_is(idle_threads):
    """Such as the generator in the discriminator's step. Threads that wait are no reason: torch.compile leaves one."""
    generator, critic = network(nn.BatchNorm1d), nn.Sequential(nn.Linear(3, 3))
    opt, (batch,) = llqr.SAM(sgd(critic), rho=0.5), batches(1)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(idle_threads):
            pool.submit(int).result()
            time.sleep(0.05)  # until it waits
        for _ in range(2):
            opt.step(closure_of(opt, lambda x: critic(generator(x).detach()), batch))
    assert generator[1].num_batches_tracked == 2


def test_a_network_that_the_loss_goes_through_is():
    """Such as a discriminator, whose parameters another optimizer has."""
    generator, critic = nn.Sequential(nn.Linear(5, 5)), network(nn.BatchNorm1d)
    opt, (batch,) = llqr.SAM(sgd(generator), rho=0.5), batches(1)
    for _ in range(2):
        opt.step(closure_of(opt, lambda x: critic(generator(x)), batch))
    assert critic[1].num_batches_tracked == 2


class Shifting(nn.Module):
    """Loses a buffer, or changes the size of one, during a pass."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.register_buffer("cache", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.what == "loses" and "cache" in self._buffers:
            del self.cache
        elif self.what == "resizes":
            self.cache.resize_(self.cache.numel() + 1).fill_(1.0)
        elif self.what == "replaces":
            self.cache = torch.zeros(self.cache.numel() + 1)
        return x


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("what", ["loses", "resizes", "replaces"])
def test_a_buffer_that_is_lost_or_changes_its_size(what, given):
    model = nn.Sequential(nn.Linear(5, 3), Shifting(what))
    opt = llqr.SAM(sgd(model), model=model if given else None)
    twin = nn.Sequential(nn.Linear(5, 3))
    twin.load_state_dict({name: p for name, p in model.state_dict().items() if "cache" not in name})
    plain = llqr.SAM(sgd(twin))
    for batch in batches(3):
        opt.step(closure_of(opt, model, batch))
        plain.step(closure_of(plain, twin, batch))
    assert model[0].weight.equal(twin[0].weight)


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
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_constants_of_any_kind_beside_the_statistics(constant, given, frozen):
    """Some of them cannot be written to, and need not be put back."""
    model = network(nn.BatchNorm1d)
    tensor = constant()
    if not frozen:
        model.register_buffer("constant", tensor)
    elif tensor.layout == torch.strided:
        model.constant = nn.Parameter(tensor, requires_grad=False)
    opt = llqr.SAM(
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), model=model if given else None
    )
    train(opt, model, batches(3))
    assert model[1].num_batches_tracked == 3


class Follower(nn.Module):
    """A frozen layer that follows another one whenever the model is called, as the encoder of keys in MoCo does."""

    def __init__(self, by_data: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.leader, self.follower, self.head = nn.Linear(5, 4), nn.Linear(5, 4), nn.Linear(4, 3)
        self.follower.requires_grad_(False)
        self.by_data = by_data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for ahead, behind in zip(self.leader.parameters(), self.follower.parameters(), strict=True):
                if self.by_data:
                    behind.data = behind.data.lerp(ahead.data, 0.1)
                else:
                    behind.lerp_(ahead, 0.1)
        return self.head(self.leader(x).tanh() * self.follower(x).tanh())


@pytest.mark.parametrize("by_data", [False, True])
@pytest.mark.parametrize("form", ["closure", "closure, model given", "passes"])
def test_frozen_parameters_that_the_model_writes_to_are_written_once_per_step(form, by_data):
    model, expected = Follower(by_data), Follower(by_data)
    opt = llqr.SAM(sgd(model), rho=0.5, model=model if "given" in form else None)
    passes = Passes(opt)

    def forward_backward(x, y):
        cross_entropy(model(x), y).backward()

    for x, y in batches(3):
        expected.leader.load_state_dict(model.leader.state_dict())
        expected(x)
        if form == "passes":
            passes.record(forward_backward, x, y)
            forward_backward(x, y)
            passes.repeat_at_probe()
            opt.step()
        else:
            opt.step(closure_of(opt, model, (x, y)))
        assert_same_bits(weights(model.follower), weights(expected.follower))


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_the_statistics_of_a_scripted_network():
    """Its buffers are not in a dictionary. One elsewhere in memory is looked at too, when the model is searched for."""
    eager, data = network(nn.BatchNorm1d), batches(3)
    scripted = torch.jit.script(network(nn.BatchNorm1d))
    for model in (eager, scripted):
        train(llqr.SAM(sgd(model)), model, data)
    assert int(scripted.state_dict()["1.num_batches_tracked"]) == 3
    torch.testing.assert_close(weights(scripted), weights(eager))  # scripted code is fused

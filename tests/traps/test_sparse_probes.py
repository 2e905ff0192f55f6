"""`every=k`: a probe in one step of k, one pass in the others; the trajectory is that of a loop written by hand."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import llqr
from llqr.integrations.passes import Passes

from .training import assert_same_bits, batches, closure_of, cross_entropy, mlp, quick_geometry, sgd, train, weights

RHO = 0.3
SCHEDULES = {"a number": 3, "a function of the step": lambda step: 3}


def by_hand(model, data, probes):
    """SAM in the steps of `probes`, SGD in the others."""
    base, parameters = sgd(model), list(model.parameters())
    for step, (x, y) in enumerate(data):
        grads = torch.autograd.grad(cross_entropy(model(x), y), parameters)
        if probes(step):
            centre = [parameter.detach().clone() for parameter in parameters]
            norm = torch.stack([grad.square().sum() for grad in grads]).sum().add(1e-12).sqrt()
            with torch.no_grad():
                for parameter, grad in zip(parameters, grads, strict=True):
                    parameter += RHO * grad / norm
            grads = torch.autograd.grad(cross_entropy(model(x), y), parameters)
            with torch.no_grad():
                for parameter, start in zip(parameters, centre, strict=True):
                    parameter.copy_(start)
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        base.step()


def test_a_start_that_is_no_whole_number():
    """`0.1 * steps`: otherwise no step would ever be a multiple of `every` after it."""
    probe = llqr.SAMProbe(rho=RHO, start_after=100.5, every=2)
    assert [step for step in range(106) if probe.active(step)] == [100, 102, 104]


def test_a_step_without_a_closure_at_a_learning_rate_of_zero_is_one():
    """A warm-up from 0 begins with it; `torch.distributed.checkpoint` makes the base's state by such a step too."""
    momenta, scaler = [], torch.amp.GradScaler("cpu", init_scale=64.0)
    for closure_form in (True, False):
        model, (batch,) = mlp(), batches(1)
        opt = llqr.SAM(sgd(model, lr=0.0), rho=RHO, start_after=2, max_norm=0.1)

        def closure(opt=opt, model=model, batch=batch):
            opt.zero_grad()
            scaler.scale(cross_entropy(model(batch[0]), batch[1])).backward()

        if closure_form:
            opt.step(closure, grad_scaler=scaler)
        else:
            closure()
            opt.step(grad_scaler=scaler)
        scaler.update()
        assert opt.steps == 1
        momenta.append({name: opt.state[p]["momentum_buffer"] for name, p in model.named_parameters()})
    assert_same_bits(*momenta)


@settings(max_examples=25, deadline=None)
@given(every=st.integers(1, 5), start_after=st.integers(0, 4))
def test_the_trajectory_is_that_of_a_loop_by_hand(every, start_after):
    data = batches(9, dtype=torch.float64)
    ours, reference = mlp(torch.float64), mlp(torch.float64)
    opt = llqr.SAM(sgd(ours), rho=RHO, every=every, start_after=start_after)
    passes = 0

    def counted(closure):
        def run():
            nonlocal passes
            passes += 1
            return closure()

        return run

    for batch in data:
        opt.step(counted(closure_of(opt, ours, batch)))
    due = [step >= start_after and (step - start_after) % every == 0 for step in range(len(data))]
    by_hand(reference, data, due.__getitem__)
    assert passes == len(data) + sum(due)
    torch.testing.assert_close(weights(ours), weights(reference), rtol=1e-12, atol=1e-14)


def test_a_radius_of_zero_takes_one_pass():
    """From a schedule, or in every group; a group whose own radius is not 0 still probes."""
    data = batches(6, dtype=torch.float64)
    ours, reference = mlp(torch.float64), mlp(torch.float64)
    opt = llqr.SAM(sgd(ours), rho=lambda step: RHO if step % 3 == 0 else 0.0)
    passes = []
    for batch in data:
        closure = closure_of(opt, ours, batch)
        opt.step(lambda closure=closure: (passes.append(opt.steps), closure())[1])
    by_hand(reference, data, lambda step: step % 3 == 0)
    assert passes == [0, 0, 1, 2, 3, 3, 4, 5]
    torch.testing.assert_close(weights(ours), weights(reference), rtol=1e-12, atol=1e-14)
    opt = llqr.SAM(torch.optim.SGD([{"params": [p]} for p in ours.parameters()], lr=0.1), rho=0.0)
    assert not opt.probing
    opt.param_groups[1]["rho"] = 0.1
    assert opt.probing


def test_the_interval_may_be_a_function_of_the_step():
    probe = llqr.SAMProbe(rho=0.05, every=lambda step: 4 if step < 8 else 2)
    assert [step for step in range(14) if probe.active(step)] == [0, 4, 8, 10, 12]
    with pytest.raises(ValueError, match=r"every: expected a number in \[1, .*at step 0"):
        llqr.SAMProbe(rho=0.05, every=lambda step: 0).active(0)
    with pytest.raises(ValueError, match="every: expected a number"):
        llqr.FriendlySAMProbe(rho=0.05, every=0)


@pytest.mark.parametrize("form", ["two calls", "passes"])
@pytest.mark.parametrize("name", ["sam", "fsam", "asam", "fishersam", "llqr+sam"])
def test_loops_without_closures_take_one_pass_between_probes(name, form):
    """`probing` tells a loop of its own whether the second pass is due; `Passes` asks by itself."""
    data = batches(7)
    called, looped = mlp(), mlp()

    def make(model):
        geometry = quick_geometry(model) if name.startswith("llqr") else None
        return llqr.build(name, sgd(model), geometry=geometry, rho=RHO, every=3, start_after=1)

    train(make(called), called, data)
    opt, count = make(looped), 0
    passes = Passes(opt)
    opt._step_supports_amp_scaling = True

    def forward_backward(x, y):
        nonlocal count
        count += 1
        cross_entropy(looped(x), y).backward()

    for x, y in data:
        if form == "passes":
            passes.run(forward_backward, x, y)
            passes.repeat_at_probe(batch=(x, y))
        else:
            forward_backward(x, y)
            if opt.probing:
                opt.first_step(batch=(x, y))
                forward_backward(x, y)
        opt.step(batch=(x, y))
        opt.zero_grad()
    assert count == len(data) + 2  # steps 1 and 4
    assert_same_bits(weights(looped), weights(called))


def test_a_resumed_run_probes_in_the_same_steps():
    data = batches(8)
    whole, parts = mlp(), mlp()
    train(llqr.FriendlySAM(sgd(whole), rho=RHO, every=3), whole, data)
    first = llqr.FriendlySAM(sgd(parts), rho=RHO, every=3)
    train(first, parts, data[:4])
    saved = copy.deepcopy(first.state_dict())
    second = llqr.FriendlySAM(sgd(parts), rho=RHO, every=3)
    second.load_state_dict(saved)
    train(second, parts, data[4:])
    assert_same_bits(weights(parts), weights(whole))


@pytest.mark.parametrize("every", SCHEDULES)
def test_the_metric_descends_in_every_step(every):
    """Between probes LLQR+SAM is LLQR: the gradient at the centre, transported."""
    data = batches(3)
    ours, plain = mlp(), mlp()
    opt = llqr.LLQRSAM(sgd(ours), quick_geometry(ours), rho=0.0, every=SCHEDULES[every])
    train(opt, ours, data)
    train(llqr.LLQR(sgd(plain), quick_geometry(plain)), plain, data)
    assert_same_bits(weights(ours), weights(plain))

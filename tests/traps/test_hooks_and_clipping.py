"""Hooks, schedulers and profilers keep working, and the base's hooks see `U g~`, which is where to clip."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import llqr

from .training import assert_same_bits, batches, closure_of, cross_entropy, mlp, quick_geometry, sgd, train, weights


def scaled(model: nn.Module, factor: float) -> llqr.FixedGeometry:
    return llqr.FixedGeometry([(p, lambda g: factor * g) for p in model.parameters()])


def test_step_hooks_of_wrapper_and_base_run_once_per_step_in_order():
    model, data = mlp(), batches(2)
    opt = llqr.SAM(sgd(model), rho=0.05)
    seen = []
    opt.register_step_pre_hook(lambda *_: seen.append("pre"))
    opt.base.register_step_pre_hook(lambda *_: seen.append("base pre"))
    opt.base.register_step_post_hook(lambda *_: seen.append("base post"))
    opt.register_step_post_hook(lambda *_: seen.append("post"))
    train(opt, model, data)
    assert seen == ["pre", "base pre", "base post", "post"] * 2


def test_base_pre_hook_sees_the_transported_gradient_at_the_restored_weights():
    model, (batch,) = mlp(torch.float64), batches(1, dtype=torch.float64)
    start = weights(model)
    opt = llqr.LLQRSAM(sgd(model, lr=0.1), scaled(model, 3.0), rho=0.2)
    at_probe = []

    def closure():
        loss = closure_of(opt, model, batch)()
        at_probe[:] = [p.grad.clone() for p in model.parameters()]
        return loss

    def check(optimizer, args, kwargs):
        assert_same_bits(weights(model), start)
        torch.testing.assert_close([p.grad for p in model.parameters()], [3.0 * g for g in at_probe])
        checked.append(optimizer)

    checked = []
    opt.base.register_step_pre_hook(check)
    opt.step(closure)
    assert checked == [opt.base]


def test_clipping_between_transport_and_base_step():
    model, (batch,) = mlp(torch.float64), batches(1, dtype=torch.float64)
    opt = llqr.LLQRSAM(sgd(model, lr=1.0, momentum=0.0), scaled(model, 100.0), rho=0.05)

    @opt.base.register_step_pre_hook
    def clip(optimizer, args, kwargs):
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    before = weights(model)
    opt.step(closure_of(opt, model, batch))
    change = torch.cat([(p - before[name]).flatten() for name, p in model.named_parameters()])
    assert change.norm().item() == pytest.approx(0.01, rel=1e-4)


def test_weight_decay_is_not_multiplied_by_the_metric():
    model, (batch,) = mlp(torch.float64), batches(1, dtype=torch.float64)
    lr, decay, u = 0.1, 0.25, 7.0
    opt = llqr.LLQR(sgd(model, lr=lr, momentum=0.0, weight_decay=decay), scaled(model, u))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    g = torch.autograd.grad(cross_entropy(model(batch[0]), batch[1]), list(model.parameters()))
    opt.step(closure_of(opt, model, batch))
    expected = [w - lr * (u * part + decay * w) for w, part in zip(before.values(), g, strict=True)]
    torch.testing.assert_close([p.detach() for p in model.parameters()], expected, rtol=1e-12, atol=1e-15)


def test_state_dict_hooks():
    model, (batch,) = mlp(), batches(1)
    opt = llqr.SAM(sgd(model), rho=0.05)
    train(opt, model, [batch])
    seen = []
    opt.register_state_dict_pre_hook(lambda o: seen.append("save pre"))
    opt.register_state_dict_post_hook(lambda o, state: seen.append("save post") or (state | {"note": 1}))
    opt.register_load_state_dict_pre_hook(lambda o, state: seen.append(f"load pre {state.pop('note')}"))
    opt.register_load_state_dict_post_hook(lambda o: seen.append("load post"))
    saved = opt.state_dict()
    opt.load_state_dict(saved)
    assert seen == ["save pre", "save post", "load pre 1", "load post"]
    assert saved["note"] == 1, "loading must not change the caller's dictionary"


@pytest.mark.parametrize("owner", ["base", "wrapper"])
def test_a_scheduler_on_either_moves_the_one_learning_rate(owner):
    model, data = mlp(), batches(4)
    opt = llqr.SAM(sgd(model, lr=0.4), rho=0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns when it believes that the optimizer did not step
        scheduler = torch.optim.lr_scheduler.StepLR(opt if owner == "wrapper" else opt.base, step_size=2, gamma=0.5)
        rates = []
        for batch in data:
            opt.step(closure_of(opt, model, batch))
            scheduler.step()
            rates.append((opt.param_groups[0]["lr"], opt.base.param_groups[0]["lr"], scheduler.get_last_lr()[0]))
    assert rates == [(r, r, r) for r in (0.4, 0.2, 0.2, 0.1)]


@pytest.mark.parametrize("scheduler", ["OneCycleLR", "CyclicLR"])
def test_schedulers_that_also_move_momentum(scheduler):
    """These read `optimizer.defaults` and write `momentum` into the groups."""
    model, (batch,) = mlp(), batches(1)
    opt = llqr.SAM(sgd(model), rho=0.05)
    make = getattr(torch.optim.lr_scheduler, scheduler)
    limits = {"max_lr": 1.0, "total_steps": 10} if scheduler == "OneCycleLR" else {"base_lr": 0.1, "max_lr": 1.0}
    schedule = make(opt, **limits)
    for _ in range(3):
        opt.step(closure_of(opt, model, batch))
        schedule.step()
    assert opt.base.param_groups[0]["lr"] != 0.1
    assert opt.base.param_groups[0]["momentum"] != 0.9


def test_the_profiler_names_both_optimizers():
    model, (batch,) = mlp(), batches(1)
    opt = llqr.SAM(sgd(model), rho=0.05)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(opt, model, [batch])
    names = {event.name for event in profile.events()}
    assert {"Optimizer.step#SAM.step", "Optimizer.step#SGD.step"} <= names


def friendly(model: nn.Module) -> llqr.Optimizer:
    return llqr.FriendlySAM(sgd(model), 0.2, 0.5, geometry=quick_geometry(model, "kfac", every=2))


def test_a_deepcopy_is_independent_and_continues_identically():
    data = batches(6)
    model = mlp()
    opt = friendly(model)
    train(opt, model, data[:3])
    twin_model, twin = copy.deepcopy((model, opt))
    halfway = weights(model)
    train(twin, twin_model, data[3:])
    assert_same_bits(weights(model), halfway)
    train(opt, model, data[3:])
    assert_same_bits(weights(twin_model), weights(model))


def test_deepcopy_under_a_scheduler_does_not_step_the_original():
    model, (batch,) = mlp(), batches(1)
    opt = llqr.SAM(sgd(model), rho=0.05)
    torch.optim.lr_scheduler.StepLR(opt, step_size=1)
    twin_model, twin = copy.deepcopy((model, opt))
    before = weights(model)
    twin.step(closure_of(twin, twin_model, batch))
    assert_same_bits(weights(model), before)
    assert any(not a.equal(b) for a, b in zip(twin_model.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_pickled_copy_continues_identically(scheduled):
    data = batches(6)
    model = mlp()
    opt = friendly(model)
    opt.register_step_pre_hook(lambda *_: None)  # as in torch, hooks are not pickled
    train(opt, model, data[:3])
    if scheduled:
        torch.optim.lr_scheduler.ConstantLR(opt, factor=1.0)
    twin_model, twin = pickle.loads(pickle.dumps((model, opt)))
    train(opt, model, data[3:])
    train(twin, twin_model, data[3:])
    assert_same_bits(weights(twin_model), weights(model))


@pytest.mark.parametrize("scaled_loss", [False, True])
def test_max_norm_clips_what_the_base_is_given(scaled_loss):
    """After the metric, as torch's hook of the base optimizer does; the norm before is told."""
    data, ends = batches(3), []
    for own in (True, False):
        model = mlp()
        base = sgd(model)
        opt = llqr.LLQRSAM(base, scaled(model, 100.0), rho=0.1, measure=True, max_norm=0.5 if own else None)
        norms = []

        def clip(optimizer, args, kwargs, norms=norms, model=model):
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))

        if not own:
            base.register_step_pre_hook(clip)
        grad_scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled_loss else None
        for x, y in data:

            def closure(model=model, opt=opt, x=x, y=y, grad_scaler=grad_scaler):
                opt.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(x), y)
                (loss if grad_scaler is None else grad_scaler.scale(loss)).backward()
                return loss

            opt.step(closure, grad_scaler=grad_scaler)
            if grad_scaler is not None:
                grad_scaler.update()
            if own:
                norms.append(opt.last["update_norm"])
        ends.append((weights(model), norms))
    assert_same_bits(ends[0][0], ends[1][0])
    assert min(ends[0][1]) > 0.5
    assert ends[0][1] == ends[1][1]


@pytest.mark.parametrize("max_norm", [lambda step: 1.0, "1", -1.0])
def test_a_max_norm_that_is_no_number_is_refused(max_norm):
    with pytest.raises((TypeError, ValueError), match="max_norm"):
        llqr.SAM(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1), rho=0.05, max_norm=max_norm)

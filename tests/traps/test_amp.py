"""Mixed precision: `GradScaler`, whose second `unscale_` raises and which refuses closures, and autocast."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import llqr

from .training import assert_same_bits, batches, closure_of, cross_entropy, mlp, quick_geometry, sgd, train, weights

SCALE = 2.0**12


def scaler(**settings: float) -> torch.amp.GradScaler:
    """One that has scaled something, before which torch refuses `scaler.step`."""
    made = torch.amp.GradScaler("cpu", **({"init_scale": SCALE, "growth_interval": 10_000} | settings))
    made.scale(torch.zeros(()))
    return made


def scaled_closure(opt, model, batch, scale: Callable) -> Callable:
    def closure():
        opt.zero_grad()
        loss = cross_entropy(model(batch[0]), batch[1])
        scale(loss).backward()
        return loss

    return closure


def step_by_keyword(opt, closure, grad_scaler, batch):
    return opt.step(closure, batch=batch, grad_scaler=grad_scaler)


def step_by_scaler(opt, closure, grad_scaler, batch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch plans to change how a scaler passes itself on
        return grad_scaler.step(opt, closure, batch=batch)


STEPS = pytest.mark.parametrize("step", [step_by_keyword, step_by_scaler])
METHODS = {
    "sgdm": lambda model: llqr.Optimizer(sgd(model)),
    "sam": lambda model: llqr.SAM(sgd(model), rho=0.2),
    "fsam": lambda model: llqr.FriendlySAM(sgd(model), rho=0.2),
    "llqr": lambda model: llqr.LLQR(sgd(model), quick_geometry(model)),
    "llqr+sam": lambda model: llqr.LLQRSAM(sgd(model), quick_geometry(model, "kfac"), rho=0.2),
}


@STEPS
@pytest.mark.parametrize("method", METHODS)
def test_scaled_run_equals_the_unscaled_one(method, step):
    """Bit-exact, because the scale is a power of two and nothing overflows."""
    data = batches(4)
    plain, scaled = mlp(), mlp()
    losses = train(METHODS[method](plain), plain, data)
    opt, grad_scaler = METHODS[method](scaled), scaler()
    for batch, loss in zip(data, losses, strict=True):
        assert step(opt, scaled_closure(opt, scaled, batch, grad_scaler.scale), grad_scaler, batch).equal(loss)
        grad_scaler.update()
    assert_same_bits(weights(scaled), weights(plain))
    assert grad_scaler.get_scale() == SCALE


@STEPS
@pytest.mark.parametrize(("method", "overflow_in"), [(m, i) for m in METHODS for i in ((1, 2) if "sam" in m else (1,))])
def test_an_overflow_in_either_pass_skips_the_step_and_shrinks_the_scale(method, overflow_in, step):
    data = batches(4)
    model = mlp()
    opt, grad_scaler = METHODS[method](model), scaler()
    step(opt, scaled_closure(opt, model, data[0], grad_scaler.scale), grad_scaler, data[0])
    grad_scaler.update()
    before, momentum = weights(model), [opt.state[p]["momentum_buffer"].clone() for p in model.parameters()]
    passes = []

    def closure():
        passes.append(1)
        loss = scaled_closure(opt, model, data[1], grad_scaler.scale)()
        if len(passes) >= overflow_in:  # the second pass is where the first overflowed
            model[0].weight.grad[0, 0] = float("inf")
        return loss

    step(opt, closure, grad_scaler, data[1])
    grad_scaler.update()
    assert len(passes) == (1 if opt.probe is None else 2), "all ranks must make as many passes"
    assert_same_bits(weights(model), before)
    assert all(opt.state[p]["momentum_buffer"].equal(m) for p, m in zip(model.parameters(), momentum, strict=True))
    assert grad_scaler.get_scale() == SCALE / 2
    # And the run continues: nothing of the overflow is remembered.
    for batch in data[2:]:
        step(opt, scaled_closure(opt, model, batch, grad_scaler.scale), grad_scaler, batch)
        grad_scaler.update()
    assert grad_scaler.get_scale() == SCALE / 2
    assert all(w.isfinite().all() and not w.equal(before[name]) for name, w in weights(model).items())


@pytest.mark.parametrize("buffers", [None, "centre", "probe"])
def test_an_overflow_leaves_no_trace_in_the_statistics(buffers):
    """Also without `model=`, where both passes write to BatchNorm's buffers."""
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)), batches(3)
    settings = {} if buffers is None else {"model": model, "buffers": buffers}
    opt, grad_scaler = llqr.SAM(sgd(model), rho=0.05, **settings), scaler(init_scale=2.0**127)
    for batch in data:
        opt.step(scaled_closure(opt, model, batch, lambda loss: grad_scaler.scale(64 * loss)), grad_scaler=grad_scaler)
        grad_scaler.update()
    assert opt.steps < len(data)
    assert all(tensor.isfinite().all() for tensor in weights(model).values())


def test_the_friendly_mean_does_not_see_an_overflow():
    data = batches(3)
    skipping, plain = mlp(), mlp()
    opt, grad_scaler = METHODS["fsam"](skipping), scaler()

    def overflowing():
        loss = scaled_closure(opt, skipping, data[1], grad_scaler.scale)()
        skipping[0].bias.grad.fill_(float("inf"))
        return loss

    opt.step(scaled_closure(opt, skipping, data[0], grad_scaler.scale), grad_scaler=grad_scaler)
    grad_scaler.update()
    opt.step(overflowing, grad_scaler=grad_scaler)
    grad_scaler.update()
    opt.step(scaled_closure(opt, skipping, data[2], grad_scaler.scale), grad_scaler=grad_scaler)
    train(METHODS["fsam"](plain), plain, [data[0], data[2]])
    assert_same_bits(weights(skipping), weights(plain))


@pytest.mark.parametrize("unscaled", ["wrapper", "base"])
def test_unscale_and_clip_before_the_step_is_not_unscaled_twice(unscaled):
    """`unscale_`, clip, `step` is the usual idiom; here without a probe (with one, clip in a hook of the base)."""
    data = batches(4)
    plain, scaled = mlp(), mlp()
    opt, other, grad_scaler = METHODS["llqr"](plain), METHODS["llqr"](scaled), scaler()
    for batch in data:
        closure_of(opt, plain, batch)()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        opt.step(batch=batch)
        scaled_closure(other, scaled, batch, grad_scaler.scale)()
        grad_scaler.unscale_(other if unscaled == "wrapper" else other.base)
        nn.utils.clip_grad_norm_(scaled.parameters(), 0.05)
        step_by_scaler(other, None, grad_scaler, batch)
        grad_scaler.update()
    assert_same_bits(weights(scaled), weights(plain))


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("zero_grad", [False, True])  # the closure zeroes
def test_two_call_form(zero_grad, clipped, every):
    data = batches(3)
    plain, scaled = mlp(), mlp()
    opt, other, grad_scaler = (*(llqr.SAM(sgd(model), rho=0.2, every=every) for model in (plain, scaled)), scaler())
    for batch in data:
        closure_of(opt, plain, batch)()
        opt.first_step(zero_grad=True)
        closure_of(opt, plain, batch)()
        opt.second_step()
        closure = scaled_closure(other, scaled, batch, grad_scaler.scale)
        closure()
        if clipped:
            grad_scaler.unscale_(other)
            nn.utils.clip_grad_norm_(scaled.parameters(), 1e6)
        other.first_step(grad_scaler=grad_scaler, zero_grad=zero_grad)
        closure()
        other.second_step(grad_scaler=grad_scaler)
        grad_scaler.update()
    assert_same_bits(weights(scaled), weights(plain))


def test_a_disabled_scaler_changes_nothing():
    data = batches(3)
    plain, scaled = mlp(), mlp()
    train(METHODS["sam"](plain), plain, data)
    opt, grad_scaler = METHODS["sam"](scaled), scaler(enabled=False)
    for i, batch in enumerate(data):
        closure = scaled_closure(opt, scaled, batch, grad_scaler.scale)
        (step_by_keyword if i % 2 else step_by_scaler)(opt, closure, grad_scaler, batch)
        grad_scaler.update()
    assert_same_bits(weights(scaled), weights(plain))


def test_scaler_beside_a_scheduler():
    """A scheduler replaces `opt.step`; the scaler must still see that it takes a `grad_scaler`."""
    model, data = mlp(), batches(2)
    opt, grad_scaler = METHODS["sam"](model), scaler()
    scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.5)
    for batch in data:
        step_by_scaler(opt, scaled_closure(opt, model, batch, grad_scaler.scale), grad_scaler, batch)
        grad_scaler.update()
        scheduler.step()
    assert opt.param_groups[0]["lr"] == pytest.approx(0.025)


def test_float16_autocast_with_a_scaler():
    model, (batch,) = mlp(), batches(1)
    opt, grad_scaler = llqr.LLQRSAM(sgd(model), quick_geometry(model, every=1), rho=0.05), scaler()

    def closure():
        opt.zero_grad()
        with torch.autocast("cpu", torch.float16):
            outputs = model(batch[0])
        assert outputs.dtype == torch.float16
        loss = cross_entropy(outputs.float(), batch[1])
        grad_scaler.scale(loss).backward()
        return loss

    losses = []
    for _ in range(10):
        losses.append(opt.step(closure, batch=batch, grad_scaler=grad_scaler).item())
        grad_scaler.update()
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("method", METHODS)
def test_bfloat16_autocast_around_the_whole_step(method):
    """The refresh stays in full precision although the caller's context is bfloat16."""
    model, (batch,) = mlp(), batches(1)
    opt = METHODS[method](model)
    with torch.autocast("cpu", torch.bfloat16):
        losses = [opt.step(closure_of(opt, model, batch), batch=batch).item() for _ in range(10)]
    assert losses[-1] < losses[0]
    if opt.geometry is not None:
        reference = METHODS[method](mlp())
        reference.geometry.refresh(batch)
        with torch.autocast("cpu", torch.bfloat16):
            again = METHODS[method](mlp())
            again.geometry.refresh(batch)
        assert_same_bits(again.geometry.metric.named_factors(), reference.geometry.metric.named_factors())


def test_an_empty_parameter_under_a_scaler():
    model, (batch,) = mlp(), batches(1)
    model.register_parameter("nothing", nn.Parameter(torch.zeros(0, 4)))
    opt, grad_scaler = METHODS["sam"](model), scaler()

    def closure():
        opt.zero_grad()
        grad_scaler.scale(cross_entropy(model(batch[0]), batch[1]) + model.nothing.sum()).backward()

    opt.step(closure, grad_scaler=grad_scaler)
    grad_scaler.update()
    assert grad_scaler.get_scale() == SCALE


def test_a_second_step_before_the_update_is_refused():
    model, (batch,) = mlp(), batches(1)
    opt, grad_scaler = METHODS["sam"](model), scaler()
    closure = scaled_closure(opt, model, batch, grad_scaler.scale)
    step_by_scaler(opt, closure, grad_scaler, None)
    with pytest.raises(RuntimeError, match=r"since the last update|after step"):
        step_by_scaler(opt, closure, grad_scaler, None)

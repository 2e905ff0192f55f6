"""Weights are never left at the probe: they are restored bit-exact, from a copy, whatever the closure does."""

import pytest
import torch
from torch import nn

import llqr

from .training import assert_same_bits, batches, closure_of, cross_entropy, mlp, quick_geometry, sgd, weights


class TwoHeads(nn.Module):
    """Uses one head in some passes and both in others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.left, self.right = nn.Linear(5, 4), nn.Linear(4, 3), nn.Linear(4, 3)
        self.both = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.trunk(x).tanh()
        return self.left(h) + self.right(h) if self.both else self.left(h)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("used_in", [1, 2])
def test_a_parameter_with_a_gradient_in_one_pass_only(used_in, set_to_none):
    model, (batch,) = TwoHeads(), batches(1)
    opt = llqr.SAM(torch.optim.SGD(model.parameters(), lr=1.0), rho=0.5)
    passes = []

    def closure():
        passes.append(1)
        model.both = len(passes) == used_in
        opt.zero_grad(set_to_none)
        loss = cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        return loss

    before = weights(model)
    seen = []
    opt.base.register_step_pre_hook(lambda *_: seen.append(weights(model)))
    opt.step(closure)
    assert_same_bits(seen[0], before)
    for name, p in model.right.named_parameters():
        moved = not p.equal(before[f"right.{name}"])
        assert moved == (used_in == 2), "the update needs a gradient at the probe"
    assert not model.left.weight.equal(before["left.weight"])


@pytest.mark.parametrize("where", ["before zero_grad", "before backward", "after backward"])
@pytest.mark.parametrize("failing_pass", [1, 2])
@pytest.mark.parametrize("learned", [False, True])
def test_a_closure_that_raises(learned, failing_pass, where):
    model, data = mlp(), batches(3)
    geometry = quick_geometry(model, "e-kfac") if learned else None
    opt = llqr.FriendlySAM(sgd(model), rho=0.7, geometry=geometry)
    opt.step(closure_of(opt, model, data[0]), batch=data[0])
    before, steps = weights(model), opt.steps
    passes = []

    def closure():
        passes.append(1)

        def fail(here: str) -> None:
            if len(passes) == failing_pass and where == here:
                raise RuntimeError("out of memory")

        fail("before zero_grad")
        opt.zero_grad()
        loss = cross_entropy(model(data[1][0]), data[1][1])
        fail("before backward")
        loss.backward()
        fail("after backward")
        return loss

    with pytest.raises(RuntimeError, match="out of memory"):
        opt.step(closure)
    assert len(passes) == failing_pass
    assert_same_bits(weights(model), before)
    assert opt.steps == steps
    opt.step(closure_of(opt, model, data[2]))  # and the run continues
    assert not model[0].weight.equal(before["0.weight"])


def test_weights_are_restored_bit_exact_where_adding_and_subtracting_would_fail():
    """A radius far above the weights: `(w + eps) - eps` would lose every bit of `w`."""
    model, (batch,) = mlp(), batches(1)
    opt = llqr.SAM(sgd(model, lr=0.0), rho=1e12)
    before = weights(model)
    opt.step(closure_of(opt, model, batch))
    assert_same_bits(weights(model), before)


def test_the_second_pass_is_at_the_probe():
    model, (batch,) = mlp(torch.float64), batches(1, dtype=torch.float64)
    opt = llqr.SAM(sgd(model), rho=0.7)
    places = []

    def closure():
        places.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        return closure_of(opt, model, batch)()

    opt.step(closure)
    assert (places[1] - places[0]).norm().item() == pytest.approx(0.7, rel=1e-6)


def test_a_custom_norm_that_returns_nonsense():
    """The displacement cannot be added; nothing may have moved."""
    model, (batch,) = mlp(), batches(1)
    opt = llqr.SAM(sgd(model), rho=0.05, norm=lambda v, d: [torch.ones(7, 1, 1) for _ in d])
    before = weights(model)
    with pytest.raises(RuntimeError):
        opt.step(closure_of(opt, model, batch))
    assert_same_bits(weights(model), before)
    closure_of(opt, model, batch)()
    with pytest.raises(RuntimeError):
        opt.first_step()
    assert_same_bits(weights(model), before)
    opt.probe.norm = "metric"
    opt.step(closure_of(opt, model, batch))


def test_a_base_step_that_raises_leaves_the_weights_at_the_centre():
    model, (batch,) = mlp(), batches(1)
    opt = llqr.SAM(sgd(model), rho=0.5)

    @opt.base.register_step_pre_hook
    def fail(*_):
        raise RuntimeError("no")

    before = weights(model)
    with pytest.raises(RuntimeError, match="no"):
        opt.step(closure_of(opt, model, batch))
    assert_same_bits(weights(model), before)


@pytest.mark.parametrize("form", ["closure", "two calls"])
@pytest.mark.parametrize("failing", ["second pass", "base"])
def test_a_failed_step_leaves_nothing_in_the_friendly_mean(form, failing):
    """Tried again, it is the step that it would have been."""
    data, ends = batches(3), []
    for fails in (False, True):
        model = mlp()
        opt = llqr.FriendlySAM(sgd(model), rho=0.5)
        opt.step(closure_of(opt, model, data[0]))
        for _ in range(1 + fails):
            failed, passes = fails and not ends[1:] and opt.steps == 1, []
            fails = False
            hook = opt.base.register_step_pre_hook(_raise) if failed and failing == "base" else None
            try:
                _step(opt, model, data[1], form, passes, failed and failing == "second pass")
            except ArithmeticError:
                assert failed
            finally:
                if hook is not None:
                    hook.remove()
        opt.step(closure_of(opt, model, data[2]))
        assert opt.steps == 3
        ends.append(weights(model))
    assert_same_bits(*ends)


def _raise(*_):
    raise ArithmeticError


def _step(opt, model, batch, form, passes, fails):
    def closure():
        passes.append(1)
        loss = closure_of(opt, model, batch)()
        if fails and len(passes) == 2:
            raise ArithmeticError
        return loss

    if form == "closure":
        opt.step(closure)
        return
    closure()
    opt.first_step()
    try:
        closure()
    except ArithmeticError:
        opt.restore()
        raise
    opt.second_step()


def test_an_interrupted_restoration_is_finished_by_the_next_step(monkeypatch):
    data, ends = batches(2), []
    for interrupted in (False, True):
        model = mlp()
        opt = llqr.SAM(sgd(model), rho=0.5)
        if interrupted:
            with monkeypatch.context() as patch:
                patch.setattr(opt._weights, "restore", _interrupt)
                with pytest.raises(KeyboardInterrupt):
                    opt.step(closure_of(opt, model, data[0]))
        opt.step(closure_of(opt, model, data[1]))
        ends.append(weights(model))
    assert_same_bits(*ends)


def _interrupt(*_):
    raise KeyboardInterrupt


def test_a_base_that_maximises_is_probed_downhill():
    model, mirrored, (batch,) = mlp(), mlp(), batches(1)
    opt = llqr.SAM(sgd(model), rho=0.5)
    other = llqr.SAM(torch.optim.SGD(mirrored.parameters(), lr=0.1, momentum=0.9, maximize=True), rho=0.5)

    def closure():
        other.zero_grad()
        loss = -cross_entropy(mirrored(batch[0]), batch[1])
        loss.backward()
        return loss

    for _ in range(3):
        opt.step(closure_of(opt, model, batch))
        other.step(closure)
    assert_same_bits(weights(mirrored), weights(model))


def test_tiny_gradients_in_half_precision():
    """`rho / norm` is infinite there, `rho g / norm` is not."""
    weight = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    opt = llqr.SAM(torch.optim.SGD([weight], lr=0.1), rho=1.0)
    weight.grad = torch.full((4,), 6e-8, dtype=torch.float16)
    opt.first_step()
    assert weight.isfinite().all()
    assert 0 < weight.float().norm() <= 1


def test_a_schedule_that_turns_the_probe_around_is_named():
    model, (batch,) = mlp(), batches(1)
    opt = llqr.SAM(sgd(model), rho=lambda step: 0.05 - step)
    opt.step(closure_of(opt, model, batch))
    before = weights(model)
    with pytest.raises(ValueError, match=r"^rho: expected a number in \[0, inf\), got -0\.95 at step 1"):
        opt.step(closure_of(opt, model, batch))
    assert_same_bits(weights(model), before)


@pytest.mark.parametrize("rho", [float("inf"), float("nan")])
def test_radii_that_are_not_finite(rho):
    model, (batch,) = mlp(), batches(1)
    with pytest.raises(ValueError, match="rho"):
        llqr.SAM(sgd(model), rho=rho)
    before = weights(model)
    opt = llqr.SAM(sgd(model), rho=lambda step: rho)
    with pytest.raises(ValueError, match=rf"rho: expected a number in \[0, inf\), got {rho} at step 0"):
        opt.step(closure_of(opt, model, batch))
    opt = llqr.SAM(torch.optim.SGD([{"params": model.parameters(), "rho": rho}], lr=0.1), rho=0.05)
    with pytest.raises(ValueError, match=r"param_groups\[0\]\['rho'\]"):
        opt.step(closure_of(opt, model, batch))
    assert_same_bits(weights(model), before)

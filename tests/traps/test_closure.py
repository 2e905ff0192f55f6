"""`step(closure)` calls the closure twice, returns the first loss, and does not trust gradients left by the caller."""

import functools
import warnings

import pytest
import torch

import llqr

from .training import assert_same_bits, batches, closure_of, mlp, quick_geometry, sam_by_hand, sgd, train, weights


def test_steps_equal_sam_written_by_hand():
    data = batches(5, dtype=torch.float64)
    ours, reference = mlp(torch.float64), mlp(torch.float64)
    opt, base = llqr.SAM(sgd(ours), rho=0.3), sgd(reference)
    losses = train(opt, ours, data)
    expected = [sam_by_hand(reference, base, batch, rho=0.3) for batch in data]
    torch.testing.assert_close(losses, expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(weights(ours), weights(reference), rtol=1e-12, atol=1e-14)


def test_calls_the_closure_twice_and_returns_the_loss_of_the_first_call():
    model, (batch,) = mlp(), batches(1)
    opt = llqr.SAM(sgd(model), rho=0.3)
    seen = []

    def closure():
        loss = closure_of(opt, model, batch)()
        seen.append(loss.item())
        return loss

    returned = opt.step(closure)
    assert len(seen) == 2
    assert seen[0] != seen[1]
    assert returned.item() == seen[0]
    assert not returned.requires_grad


def test_a_closure_may_return_a_tensor_that_it_writes_again():
    model, (batch,) = mlp(), batches(1)
    opt, total = llqr.SAM(sgd(model), rho=5.0), torch.zeros(())
    closure = closure_of(opt, model, batch)
    first = closure().item()
    assert opt.step(lambda: total.copy_(closure().detach())) == first


def test_a_closure_may_return_a_plain_number():
    model, (batch,) = mlp(), batches(1)
    opt = llqr.SAM(sgd(model), rho=0.05)
    closure = closure_of(opt, model, batch)
    first = closure().item()
    assert opt.step(lambda: closure().item()) == first


def test_gradients_left_by_the_caller_do_not_matter():
    data = batches(3)
    fresh, dirty = mlp(), mlp()
    opt = llqr.SAM(sgd(fresh), rho=0.05)
    train(opt, fresh, data)
    other = llqr.SAM(sgd(dirty), rho=0.05)
    for batch in data:
        for p in dirty.parameters():
            p.grad = torch.full_like(p, 7.0)
        other.step(closure_of(other, dirty, batch))
    assert_same_bits(weights(dirty), weights(fresh))


@pytest.mark.parametrize("schedule", [{}, {"every": 2}, {"start_after": 2}])
@pytest.mark.parametrize("make", [llqr.SAM, llqr.FriendlySAM])
def test_a_closure_that_forgets_zero_grad_is_still_right(make, schedule):
    data = batches(3)
    careful, careless = mlp(), mlp()
    train(make(sgd(careful), 0.05, **schedule), careful, data)
    opt = make(sgd(careless), 0.05, **schedule)
    for x, y in data:

        def closure(x=x, y=y):
            loss = torch.nn.functional.cross_entropy(careless(x), y)
            loss.backward()
            return loss

        opt.step(closure)
    assert_same_bits(weights(careless), weights(careful))


def test_works_under_no_grad_and_with_any_callable():
    data = batches(2)
    plain, wrapped = mlp(), mlp()
    train(llqr.SAM(sgd(plain), rho=0.05), plain, data)
    opt = llqr.SAM(sgd(wrapped), rho=0.05)

    def run(batch):
        return closure_of(opt, wrapped, batch)()

    with torch.no_grad():
        for batch in data:
            opt.step(functools.partial(run, batch))
    assert_same_bits(weights(wrapped), weights(plain))


@pytest.mark.parametrize("make", [functools.partial(llqr.SAM, rho=0.05), llqr.Optimizer])
def test_a_step_without_gradients_does_nothing_and_says_so_once(make):
    """As torch's own, for loops that skip a batch; the base's hooks run, and the step is not counted."""
    model, data = mlp(), batches(2)
    opt = make(sgd(model))
    seen = []
    opt.base.register_step_pre_hook(lambda *_: seen.append(1))
    before = weights(model)
    with pytest.warns(UserWarning, match=r"step: no parameter .*backward"):
        opt.step(lambda: model(data[0][0]).sum())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step(lambda: None)
    assert_same_bits(weights(model), before)
    assert (opt.steps, len(opt.state), len(seen)) == (0, 0, 2)
    fresh = mlp()
    train(make(sgd(fresh)), fresh, data)
    train(opt, model, data)
    assert_same_bits(weights(model), weights(fresh))


def test_a_probe_without_closure_is_an_error_and_changes_nothing():
    model, (batch,) = mlp(), batches(1)
    geometry = quick_geometry(model)
    opt = llqr.LLQRSAM(sgd(model), geometry, rho=0.05)
    before = weights(model)
    with pytest.raises(TypeError, match="closure"):
        opt.step(batch=batch)
    assert_same_bits(weights(model), before)
    assert geometry.refreshes == 0
    assert geometry.due


def test_a_batch_in_the_place_of_the_closure_is_named():
    model, (batch,) = mlp(), batches(1)
    for opt in (llqr.SAM(sgd(model), rho=0.05), llqr.LLQR(sgd(model), quick_geometry(model))):
        with pytest.raises(TypeError, match=r"^closure: expected a function .*, got tuple; .*batch="):
            opt.step(batch)


def test_without_a_probe_gradients_may_be_computed_before_the_step():
    data = batches(4)
    given, called = mlp(), mlp()
    opt, other = llqr.LLQR(sgd(given), quick_geometry(given)), llqr.LLQR(sgd(called), quick_geometry(called))
    for batch in data:
        opt.zero_grad()
        torch.nn.functional.cross_entropy(given(batch[0]), batch[1]).backward()
        assert opt.step(batch=batch) is None
    train(other, called, data)
    assert_same_bits(weights(given), weights(called))


def test_a_warm_up_needs_no_closure():
    model, data = mlp(), batches(2)
    opt = llqr.SAM(sgd(model), rho=0.05, start_after=1)
    torch.nn.functional.cross_entropy(model(data[0][0]), data[0][1]).backward()
    opt.step()
    with pytest.raises(TypeError, match="closure"):
        opt.step()


def test_start_after_is_the_base_optimizer_until_then():
    data = batches(4)
    warm, plain = mlp(), mlp()
    opt, base = llqr.SAM(sgd(warm), rho=0.5, start_after=3), sgd(plain)
    train(opt, warm, data[:3])
    for batch in data[:3]:
        closure_of(base, plain, batch)()
        base.step()
    assert_same_bits(weights(warm), weights(plain))
    opt.step(closure_of(opt, warm, data[3]))
    closure_of(base, plain, data[3])()
    base.step()
    assert any(not a.equal(b) for a, b in zip(warm.parameters(), plain.parameters(), strict=True))


def test_rho_may_be_a_function_of_the_step():
    data = batches(3, dtype=torch.float64)
    ours, reference = mlp(torch.float64), mlp(torch.float64)
    train(llqr.SAM(sgd(ours), rho=lambda step: 0.1 * (step + 1)), ours, data)
    base = sgd(reference)
    for step, batch in enumerate(data):
        sam_by_hand(reference, base, batch, rho=0.1 * (step + 1))
    torch.testing.assert_close(weights(ours), weights(reference), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("make", [llqr.LLQR, functools.partial(llqr.LLQRSAM, rho=0.05)])
def test_a_due_refresh_without_batch_is_an_error(make):
    model, (batch,) = mlp(), batches(1)
    opt = make(sgd(model), quick_geometry(model))
    before = weights(model)
    with pytest.raises(ValueError, match=r"batch: a refresh is due at step 0.*batch=.*llqr\.integrations"):
        opt.step(closure_of(opt, model, batch))
    assert_same_bits(weights(model), before)
    opt.step(closure_of(opt, model, batch), batch=batch)
    opt.step(closure_of(opt, model, batch))  # no refresh is due, so none is needed


def test_a_batch_may_be_a_function_that_is_only_called_when_due():
    model, data = mlp(), batches(4)
    opt = llqr.LLQR(sgd(model), quick_geometry(model, every=3))
    draws = []

    def draw():
        draws.append(opt.steps)
        return data[0]

    for batch in data:
        opt.step(closure_of(opt, model, batch), batch=draw)
    assert draws == [0, 3]


def test_refuses_what_cannot_be_wrapped():
    model = mlp()
    with pytest.raises(TypeError, match=r"base: .*Linear"):
        llqr.SAM(model[0], rho=0.05)
    with pytest.raises(TypeError, match="LBFGS"):
        llqr.SAM(torch.optim.LBFGS(model.parameters()), rho=0.05)
    with pytest.raises(TypeError, match="geometry"):
        llqr.LLQR(sgd(model), "diagonal")


def test_warnings_point_at_the_line_that_called_the_library():
    """Not into the library or torch, however deep they come from."""
    model, (batch,) = mlp(), batches(1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        weak, low = llqr.Inner(steps=1, lr=1e-6), llqr.Runtime(max_side=6)
        geometry = llqr.Geometry(model, torch.nn.functional.cross_entropy, every=1, inner=weak, runtime=low)
        opt = llqr.LLQRSAM(sgd(model), geometry, rho=0.1)
        torch.optim.lr_scheduler.StepLR(opt, step_size=1)  # replaces `step`
        for _ in range(3):
            opt.step(closure_of(opt, model, batch), batch=batch)
        opt.zero_grad()
        opt.step(lambda: torch.zeros(()), batch=batch)
    for kind in ("max_side=6", "nearly nothing", "no parameter of the optimizer"):
        assert [warning.filename for warning in told if kind in str(warning.message)] == [__file__]

"""`measure=True`: what `opt.last` tells about a step, beside the same numbers computed by hand in float64."""

import pytest
import torch

import llqr
from llqr.integrations.passes import Passes
from traps.training import batches, cross_entropy, mlp, quick_geometry, sgd, train, weights


def by_hand(model, batch, rho, U=None):
    """Loss, loss at the probe, `|g|` and `|eps|`, with `eps = rho U g / sqrt(g.Ug)`."""
    parameters = list(model.parameters())
    loss = cross_entropy(model(batch[0]), batch[1])
    g = torch.autograd.grad(loss, parameters)
    Ug = g if U is None else U(parameters, g)
    root = torch.sqrt(sum((a * b).sum() for a, b in zip(g, Ug, strict=True)))
    eps = [rho * part / root for part in Ug]
    there = {name: p + e for (name, p), e in zip(model.named_parameters(), eps, strict=True)}
    probe = cross_entropy(torch.func.functional_call(model, there, batch[0]), batch[1])
    return {
        "loss": float(loss),
        "loss_at_probe": float(probe),
        "gradient_norm": float(torch.sqrt(sum(part.square().sum() for part in g))),
        "displacement": float(torch.sqrt(sum(part.square().sum() for part in eps))),
    }


def measured(step):
    return {name: float(value) for name, value in step.items() if name not in ("step", "passes")}


@pytest.mark.parametrize("metric", [False, True])
def test_what_a_step_measured(metric):
    model, data = mlp(torch.float64), batches(3, dtype=torch.float64)
    geometry = quick_geometry(model, "kfac", every=100) if metric else None
    opt = llqr.SAM(sgd(model), rho=0.3, geometry=geometry, measure=True)
    assert opt.last is None
    train(opt, model, data[:2])
    expected = by_hand(model, data[2], 0.3, geometry.transport if metric else None)
    train(opt, model, data[2:])
    assert (opt.last["step"], opt.last["passes"]) == (2, 2)
    assert measured(opt.last) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("form", ["two calls", "passes"])
def test_without_a_closure(form):
    model, (batch,) = mlp(torch.float64), batches(1, dtype=torch.float64)
    opt = llqr.SAM(sgd(model), rho=0.3, measure=True)
    expected = by_hand(model, batch, 0.3)

    def forward_backward(x, y):
        loss = cross_entropy(model(x), y)
        loss.backward()
        return loss

    if form == "passes":
        passes = Passes(opt)
        passes.run(forward_backward, *batch)
        passes.repeat_at_probe()
        opt.step()
        assert measured(opt.last) == pytest.approx(expected, rel=1e-9)
    else:
        forward_backward(*batch)
        opt.first_step()
        forward_backward(*batch)
        opt.second_step()
        assert measured(opt.last) == pytest.approx({"gradient_norm": expected["gradient_norm"], "displacement": 0.3})


def test_passes_of_steps_that_were_not_repeated_do_not_count():
    """Between probes a loop may call `step` alone."""
    model, data = mlp(), batches(3)
    opt = llqr.SAM(sgd(model), rho=0.3, start_after=2, measure=True)
    passes = Passes(opt)

    def forward_backward(x, y):
        opt.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        return loss

    for batch in data:
        loss = passes.run(forward_backward, *batch)
        if opt.probing:
            passes.repeat_at_probe()
        opt.step()
    assert opt.last["loss"].equal(loss.detach())


def test_passes_that_return_something_else_have_no_loss():
    model, (batch,) = mlp(), batches(1)
    opt = llqr.SAM(sgd(model), rho=0.3, measure=True)
    passes = Passes(opt)
    passes.run(lambda x, y: cross_entropy(model(x), y).backward(), *batch)
    passes.repeat_at_probe()
    opt.step()
    assert set(measured(opt.last)) == {"gradient_norm", "displacement"}


def test_a_step_of_one_pass_and_a_plain_optimizer():
    model, data = mlp(torch.float64), batches(2, dtype=torch.float64)
    for opt in (llqr.SAM(sgd(model), rho=0.3, every=2, measure=True), llqr.Optimizer(sgd(model), measure=True)):
        train(opt, model, data[:1])
        expected = by_hand(model, data[1], 0.3)
        train(opt, model, data[1:])
        assert opt.last["passes"] == 1
        assert measured(opt.last) == pytest.approx({name: expected[name] for name in ("loss", "gradient_norm")})


def test_measuring_changes_nothing():
    ends = []
    for measure in (False, True):
        model = mlp()
        opt = llqr.SAM(sgd(model), rho=0.3, measure=measure)
        train(opt, model, batches(3))
        ends.append(weights(model))
        assert (opt.last is not None) == measure
    assert all(a.equal(ends[1][name]) for name, a in ends[0].items())


def test_under_a_loss_scale():
    model, (batch,) = mlp(), batches(1)
    expected = by_hand(model, batch, 0.3)
    opt, scaler = llqr.SAM(sgd(model), rho=0.3, measure=True), torch.amp.GradScaler("cpu", init_scale=64.0)

    def scaled():
        opt.zero_grad()
        loss = cross_entropy(model(batch[0]), batch[1])
        scaler.scale(loss).backward()
        return loss

    opt.step(scaled, grad_scaler=scaler)
    assert measured(opt.last) == pytest.approx(expected, rel=1e-4)

"""Loops without a framework and without closures, in the shape of torchvision's and timm's; and what is imported."""

import pytest
import torch
from pytorch_optimizer import Lookahead
from torch import nn
from torch.nn.functional import cross_entropy

import llqr
from llqr.integrations.passes import Passes
from reference_loops import seed_micro_batch, train_by_hand, train_in_two_calls
from small_trainings import assert_same, llqr_sam, network, sam, samples, sgd


def torchvisions_loop(model, optimizer, *, scaler=None, clip=None):
    """`references/classification/train.py`: one batch a step."""
    passes = Passes(optimizer)
    for i, (image, target) in enumerate(samples()):
        seed_micro_batch(0, i)

        def compute_loss(image=image, target=target):
            with torch.autocast("cpu", torch.float16, enabled=scaler is not None, cache_enabled=False):
                return cross_entropy(model(image), target)

        def scaled(loss):
            return loss if scaler is None else scaler.scale(loss)

        optimizer.zero_grad()
        if scaler is None:
            passes.run(lambda x, y: cross_entropy(model(x), y).backward(), image, target)
        else:
            passes.run(lambda compute_loss=compute_loss: scaled(compute_loss()).backward())
        passes.repeat_at_probe(batch=(image, target), grad_scaler=scaler)
        if clip is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()


@pytest.mark.parametrize("clip", [None, 0.1])
def test_torchvisions_loop(clip):
    model, other = network(), network()
    torchvisions_loop(model, sam(model), clip=clip)
    train_by_hand(other, sgd(other), samples(), rho=0.1, clip=clip)
    assert_same(model, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_torchvisions_loop_with_amp(clip):
    ours, theirs = (torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=3) for _ in range(2))
    model, other = network(), network()
    torchvisions_loop(model, llqr_sam(model), scaler=ours, clip=clip)
    train_in_two_calls(other, llqr_sam(other), samples(), scaler=theirs, autocast=torch.float16, clip=clip)
    assert ours.get_scale() == theirs.get_scale() < 2.0**24
    assert_same(model, other, rtol=1e-6, atol=1e-6)


def timms_loop(model, optimizer, accumulate):
    """`train.py`: gradients accumulate, and are zeroed after the step."""
    passes = Passes(optimizer)
    optimizer.zero_grad()
    for i, (image, target) in enumerate(samples()):
        seed_micro_batch(0, i)
        passes.run(lambda x, y: (cross_entropy(model(x), y) / accumulate).backward(), image, target)
        if (i + 1) % accumulate == 0:
            passes.repeat_at_probe(batch=(image, target))
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("accumulate", [1, 4])
def test_timms_loop(accumulate):
    model, other = network(), network()
    timms_loop(model, sam(model), accumulate)
    train_by_hand(other, sgd(other), samples(), rho=0.1, accumulate=accumulate)
    assert_same(model, other, rtol=1e-6, atol=1e-6)


def test_a_base_that_wraps_an_optimizer_of_its_own():
    model, other = network(), network()
    timms_loop(model, llqr.SAM(Lookahead(sgd(model), k=1), rho=0.1, model=model), 4)
    train_by_hand(other, Lookahead(sgd(other), k=1), samples(), rho=0.1, accumulate=4)
    assert_same(model, other, rtol=1e-6, atol=1e-6)


def test_a_geometry_with_batches_of_its_own_is_given_none():
    model, other = network(), network()
    ours, theirs = llqr_sam(model), llqr_sam(other)
    ours.geometry.batches = samples()[::-1]
    timms_loop(model, ours, 2)
    drawn = iter(samples()[::-1])
    for start in range(0, len(samples()), 2):

        def forward_backward(start=start):
            theirs.zero_grad()
            for i in (start, start + 1):
                seed_micro_batch(0, i)
                (cross_entropy(other(samples()[i][0]), samples()[i][1]) / 2).backward()

        forward_backward()
        theirs.first_step(batch=lambda: next(drawn))
        forward_backward()
        theirs.second_step()
    assert_same(model, other)


def test_another_random_mask_if_asked_for():
    masks = []

    def forward_backward():
        masks.append(torch.rand(1))
        model(samples()[0][0]).sum().backward()

    model = network()
    for same in (True, False):
        passes = Passes(sam(model, same_dropout=same))
        passes.run(forward_backward)
        passes.repeat_at_probe()
    assert masks[0] == masks[1]
    assert masks[2] != masks[3]


def test_a_second_pass_of_nothing_is_refused():
    model = network()
    opt = sam(model)
    model(samples()[0][0]).sum().backward()
    with pytest.raises(RuntimeError, match="there is no pass to repeat"):
        Passes(opt).repeat_at_probe()
    assert not opt._begun


def test_a_pass_that_raises_leaves_the_weights_at_the_centre():
    model = network()
    opt = sam(model)
    passes = Passes(opt)
    before = [p.detach().clone() for p in model.parameters()]

    def failing(runs=[]):  # noqa: B006
        runs.append(1)
        if len(runs) == 2:
            raise ValueError("no more")
        model(samples()[0][0]).sum().backward()

    passes.run(failing)
    with pytest.raises(ValueError, match="no more"):
        passes.repeat_at_probe()
    assert all(torch.equal(p, saved) for p, saved in zip(model.parameters(), before, strict=True))
    assert opt.steps == 0


def test_a_batch_that_failed_and_was_skipped_is_not_repeated():
    models = network(), network()
    for model in models:
        opt = sam(model)
        passes = Passes(opt)
        if model is models[1]:
            with pytest.raises(MemoryError):
                passes.run(_fail, samples()[1])
        torch.manual_seed(3)
        passes.run(lambda x, y, model=model: cross_entropy(model(x), y).backward(), *samples()[0])
        passes.repeat_at_probe()
        opt.step()
    assert_same(*models)


def test_a_failed_pass_after_a_step_by_closure_is_not_repeated():
    model, (x, y) = network(), samples()[0]
    opt = sam(model)
    passes, runs = Passes(opt), []

    def forward_backward(name):
        runs.append(name)
        loss = cross_entropy(model(x), y)
        loss.backward()
        return loss

    passes.run(forward_backward, "dropped")
    opt.zero_grad()
    opt.step(lambda: forward_backward("closure"))
    with pytest.raises(MemoryError):
        passes.run(_fail, x)
    passes.run(forward_backward, "kept")
    passes.repeat_at_probe()
    opt.step()
    assert runs == ["dropped", "closure", "closure", "kept", "kept"]


def _fail(batch):
    raise MemoryError


def test_an_overflow_that_the_second_pass_does_not_repeat():
    """Such as one of other dropout masks: the step is from the centre, and counts."""
    model, other, factors = network(), network(), [float("inf"), 1.0]
    opt, scaler, (x, y) = sam(model), torch.amp.GradScaler("cpu"), samples()[0]
    passes = Passes(opt)
    torch.manual_seed(3)
    passes.run(lambda: scaler.scale(factors.pop(0) * cross_entropy(model(x), y)).backward())
    passes.repeat_at_probe(grad_scaler=scaler)
    scaler.step(opt)
    assert opt.steps == 1
    torch.manual_seed(3)
    plain = sgd(other)
    cross_entropy(other(x), y).backward()
    plain.step()
    assert_same(model, other, rtol=1e-6, atol=1e-6)


def test_after_a_second_pass_that_failed_the_random_numbers_go_on():
    model = network()
    passes, drawn = Passes(sam(model)), []

    def forward_backward():
        if drawn:
            raise MemoryError
        drawn.append(torch.rand(1))
        model(samples()[0][0]).sum().backward()

    passes.run(forward_backward)
    state = torch.get_rng_state()
    with pytest.raises(MemoryError):
        passes.repeat_at_probe()
    assert torch.get_rng_state().equal(state)

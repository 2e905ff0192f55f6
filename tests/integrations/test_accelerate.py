"""Accelerate's loop, with its own wrapper of the optimizer, beside loops written by hand."""

import math

import accelerate
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from accelerators import forget_accelerators
from llqr.integrations.accelerate import TwoPasses
from reference_loops import seed_micro_batch, train_by_hand, train_in_two_calls
from small_trainings import assert_same, llqr_sam, network, plain_llqr, sam, samples, sgd, weights


def accelerator(accumulate=1, **settings):
    forget_accelerators()
    return accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate, **settings)


def with_fp16(acc, scaler):
    """What `mixed_precision="fp16"` sets, which Accelerate refuses on a CPU, with a scaler for the CPU."""
    acc.native_amp, acc.scaler = True, scaler
    acc.state._mixed_precision = "fp16"
    return acc


def train(acc, model, opt, *, epochs=1, clip=None, after=None):
    net, opt, loader = acc.prepare(model, opt, DataLoader(samples(), batch_size=None))
    passes = TwoPasses(acc, opt, net)
    losses = []
    for epoch in range(epochs):
        for i, (x, y) in enumerate(loader):

            def compute_loss(x=x, y=y, i=i, epoch=epoch):
                seed_micro_batch(epoch, i)
                return cross_entropy(net(x), y)

            with acc.accumulate(net):
                losses.append(passes.backward(compute_loss, batch=(x, y)))
                if clip is not None and acc.sync_gradients:
                    acc.clip_grad_norm_(net.parameters(), clip)
                opt.step()
                opt.zero_grad()
        if after is not None:
            after(epoch)
    return losses


def test_accumulation_by_hand():
    """As in Accelerate's nlp_example: the loop divides the loss and steps every second micro-batch."""
    model, other = network(), network()
    opt = sam(model)
    net, wrapped = accelerator().prepare(model, opt)
    passes = TwoPasses(accelerator(), wrapped, net)
    for i, (x, y) in enumerate(samples()):
        seed_micro_batch(0, i)
        last = i % 2 == 1
        passes.backward(lambda x, y: cross_entropy(net(x), y) / 2, x, y, last=last)
        if last:
            wrapped.step()
            wrapped.zero_grad()
    train_by_hand(other, sgd(other), samples(), rho=0.1, accumulate=2)
    assert_same(model, other, rtol=1e-6, atol=1e-6)


def test_accumulation_by_hand_that_is_not_told_is_refused():
    model = network()
    net, wrapped = accelerator().prepare(model, sam(model))
    passes = TwoPasses(accelerator(), wrapped, net)
    (x, y), *_ = samples()
    passes.backward(lambda: cross_entropy(net(x), y) / 2)
    with pytest.raises(RuntimeError, match=r"^backward: optimizer.step\(\) did not follow .* pass last=False"):
        passes.backward(lambda: cross_entropy(net(x), y) / 2)
    wrapped.zero_grad()  # a loop that has decided against a step goes on
    passes.backward(lambda: cross_entropy(net(x), y) / 2)


@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (2, None), (2, 0.1), (3, None)])
def test_sam_is_the_loop_written_by_hand(accumulate, clip):
    model, other = network(), network()
    opt = sam(model)
    losses = train(accelerator(accumulate), model, opt, epochs=2, clip=clip)
    expected = train_by_hand(other, sgd(other), samples(), rho=0.1, accumulate=accumulate, epochs=2, clip=clip)
    assert opt.steps == 2 * math.ceil(len(samples()) / accumulate)
    assert_same(model, other, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", [llqr_sam, plain_llqr])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_learned_metric_is_bit_equal(method, accumulate):
    model, other = network(), network()
    train(accelerator(accumulate), model, method(model), epochs=2)
    train_in_two_calls(other, method(other), samples(), accumulate=accumulate, epochs=2)
    assert_same(model, other)


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_fp16(accumulate, clip):
    def scaler():
        return torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=3)  # the first steps overflow

    model, other, ours, theirs = network(), network(), scaler(), scaler()
    train(with_fp16(accelerator(accumulate), ours), model, llqr_sam(model), epochs=3, clip=clip)
    settings = {"accumulate": accumulate, "epochs": 3, "clip": clip, "autocast": torch.float16}
    train_in_two_calls(other, llqr_sam(other), samples(), scaler=theirs, **settings)
    assert ours.get_scale() == theirs.get_scale() < 2.0**24
    assert_same(model, other, rtol=1e-6, atol=1e-6)


def test_a_step_that_overflows_counts_as_skipped():
    """By `optimizer_step_was_skipped`, from which Accelerate's schedulers and the Hugging Face Trainer learn it."""
    model = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17, growth_interval=100)
    acc = with_fp16(accelerator(), scaler)
    net, opt = acc.prepare(model, sam(model))
    scheduler = acc.prepare(torch.optim.lr_scheduler.ExponentialLR(opt, 0.5))
    passes = TwoPasses(acc, opt, net)
    skipped, moved = [], []
    for x, y in samples():
        scale, before = scaler.get_scale(), weights(model)
        passes.backward(lambda x, y: cross_entropy(net(x), y), x, y)
        opt.step()
        skipped.append(acc.optimizer_step_was_skipped)
        moved.append(not all(torch.equal(a, b) for a, b in zip(before[:2], weights(model)[:2], strict=True)))
        assert skipped[-1] == (scaler.get_scale() < scale) == (not moved[-1])
        scheduler.step()
        opt.zero_grad()
    assert skipped[0]
    assert not skipped[-1]
    assert opt.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5 ** skipped.count(False))


def test_bf16():
    model, other = network(), network()
    train(accelerator(2, mixed_precision="bf16"), model, llqr_sam(model), epochs=2)
    train_in_two_calls(other, llqr_sam(other), samples(), accumulate=2, epochs=2, autocast=torch.bfloat16)
    assert_same(model, other)


def test_a_refresh_has_a_precision_of_its_own_in_any_loop():
    model, batch = network().eval(), samples()[0]
    geometry = llqr_sam(model).geometry

    def product():
        with geometry.quadratic_model(batch) as quadratic:
            return quadratic.product(quadratic.gradient)

    before = product()
    net = accelerator(mixed_precision="bf16").prepare(model)
    with torch.no_grad():
        assert net(batch[0]).dtype == torch.float32
        assert not net(batch[0]).equal(model._original_forward(batch[0]))
    assert all(Hg.equal(before[name]) for name, Hg in product().items())


def test_a_geometry_draws_from_the_loader_of_the_loop():
    """Which must still see its own end: the last micro-batches are fewer."""
    acc, model = accelerator(2), network()
    opt = llqr_sam(model)
    net, wrapped, loader = acc.prepare(model, opt, DataLoader(samples(5), batch_size=None))
    opt.geometry.batches = loader
    passes = TwoPasses(acc, wrapped, net)
    for x, y in loader:
        with acc.accumulate(net):
            passes.backward(lambda x, y: cross_entropy(net(x), y), x, y)
            wrapped.step()
            wrapped.zero_grad()
    assert (opt.steps, opt.geometry.refreshes) == (3, 2)


def test_micro_batches_that_the_loop_drops():
    models = network(), network()
    for model in models:
        opt = sam(model)
        net, wrapped = accelerator().prepare(model, opt)
        passes = TwoPasses(accelerator(), wrapped, net)
        if model is models[0]:
            passes.backward(lambda x, net=net: 100 * net(x).square().sum(), samples()[1][0], last=False)
            wrapped.zero_grad()
            passes.forget()
            model.load_state_dict(network().state_dict())  # BatchNorm's statistics
        torch.manual_seed(0)
        passes.backward(lambda x, y, net=net: cross_entropy(net(x), y), *samples()[0], last=True)
        wrapped.step()
    assert_same(*models)


def test_saved_state_continues_bit_equal(tmp_path):
    whole, half, rest = network(), network(), network()
    train(accelerator(2), whole, llqr_sam(whole), epochs=2)

    acc = accelerator(2)
    train(acc, half, llqr_sam(half), after=lambda epoch: acc.save_state(tmp_path))

    acc, opt = accelerator(2), llqr_sam(rest)
    net, prepared, loader = acc.prepare(rest, opt, DataLoader(samples(), batch_size=None))
    acc.load_state(tmp_path)
    assert opt.steps == len(samples()) / 2
    passes = TwoPasses(acc, prepared, net)
    for i, (x, y) in enumerate(loader):

        def compute_loss(x=x, y=y, i=i):
            seed_micro_batch(1, i)
            return cross_entropy(net(x), y)

        with acc.accumulate(net):
            passes.backward(compute_loss, batch=(x, y))
            prepared.step()
            prepared.zero_grad()
    assert_same(whole, rest)


def test_a_closure_needs_nothing_else():
    model, other = network(), network()
    acc = accelerator()
    net, opt, loader = acc.prepare(model, sam(model), DataLoader(samples(), batch_size=None))
    for i, (x, y) in enumerate(loader):

        def closure(x=x, y=y, i=i):
            seed_micro_batch(0, i)
            opt.zero_grad()
            loss = cross_entropy(net(x), y)
            acc.backward(loss)
            return loss

        opt.step(closure)
    train_by_hand(other, sgd(other), samples(), rho=0.1)
    assert_same(model, other, rtol=1e-6, atol=1e-6)


def test_accumulation_outside_the_closure_is_refused():
    model = network()
    acc = accelerator(2)
    net, opt, loader = acc.prepare(model, sam(model), DataLoader(samples(), batch_size=None))

    def loop():
        for x, y in loader:

            def closure(x=x, y=y):
                loss = cross_entropy(net(x), y)
                acc.backward(loss)
                return loss

            with acc.accumulate(net):
                if not acc.sync_gradients:
                    closure()
                opt.step(closure)
                opt.zero_grad()

    with pytest.raises(RuntimeError, match="outside the closure"):
        loop()


def test_a_plain_optimizer_passes_through():
    model, other = network(), network()
    train(accelerator(2), model, sgd(model))
    base = sgd(other)
    for start in range(0, len(samples()), 2):
        base.zero_grad()
        for i in (start, start + 1):
            seed_micro_batch(0, i)
            (cross_entropy(other(samples()[i][0]), samples()[i][1]) / 2).backward()
        base.step()
    assert_same(model, other, rtol=1e-6, atol=1e-6)

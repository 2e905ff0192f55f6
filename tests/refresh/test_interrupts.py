"""Ctrl-C during a refresh: the model keeps its own tensors and its mode, and the process its forward mode."""

import os
import random
import signal
import threading
import time

import pytest

import llqr
from geometries import flat_geometry
from llqr.refresh import interrupts
from traps.training import assert_same_bits, batches, closure_of, cross_entropy, mlp, quick_geometry, sgd, weights


@pytest.fixture(autouse=True)
def _python_handles_signals():
    """A process that was started in the background ignores Ctrl-C, as a shell without job control has it."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


def whole(model, parameters):
    return all(own is p for own, p in zip(model.parameters(), parameters, strict=True)) and model.training


@pytest.mark.parametrize("engine", ["finite-differences", "forward", "double-backward"])
def test_signals_at_random_times(engine):
    """A thread sends real ones, all through refreshes."""
    model, (batch,) = mlp(), batches(1)
    parameters = list(model.parameters())
    geometry = flat_geometry(model, cross_entropy, engine=engine, steps=5)
    armed, met, over = threading.Event(), threading.Event(), threading.Event()
    draw = random.Random(0)

    def send():
        """Again if it had no effect: Python drops an exception that a signal raises in a destructor."""
        while not over.is_set():
            if armed.wait(0.1):
                time.sleep(draw.uniform(0, 0.01))
                os.kill(os.getpid(), signal.SIGINT)
                if met.wait(2):
                    met.clear()

    sender = threading.Thread(target=send)
    sender.start()
    for _ in range(60):
        try:
            armed.set()
            while True:
                geometry.refresh(batch)
        except KeyboardInterrupt:
            armed.clear()
            assert whole(model, parameters)
            met.set()
    over.set()
    sender.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ends = []
    for own in (model, mlp()):
        fresh = flat_geometry(own, cross_entropy, engine=engine, steps=5)
        fresh.refresh(batch)
        ends.append(fresh.metric.named_factors())
    assert_same_bits(*ends)


def test_one_waits_for_the_end_of_a_product_and_two_do_not():
    reached = []

    def pressed_once():
        with interrupts.deferred():
            os.kill(os.getpid(), signal.SIGINT)
            reached.append("held back")
            interrupts.check()
            reached.append("never")

    def pressed_twice():
        with interrupts.deferred():
            os.kill(os.getpid(), signal.SIGINT)
            reached.append("held back again")
            os.kill(os.getpid(), signal.SIGINT)
            reached.append("never")

    for press in (pressed_once, pressed_twice):
        with pytest.raises(KeyboardInterrupt):
            press()
    assert reached == ["held back", "held back again"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_at_the_end_at_the_latest():
    with pytest.raises(KeyboardInterrupt), interrupts.deferred(), interrupts.deferred():
        os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_that_is_ignored_stays_ignored():
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts.deferred():
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, previous)


def test_other_threads_do_not_touch_signals():
    seen = []

    def work():
        with interrupts.deferred():
            interrupts.check()
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def test_an_exception_while_torch_puts_parameters_back(monkeypatch):
    """Such as a second Ctrl-C: they are put back once more."""
    from torch.nn.utils import _named_member_accessor as accessor

    model, (batch,) = mlp(), batches(1)
    parameters = list(model.parameters())
    geometry = quick_geometry(model)
    swap, calls = accessor.swap_tensor, []

    def failing(module, name, tensor, allow_missing=False):
        calls.append(1)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return swap(module, name, tensor, allow_missing)

    monkeypatch.setattr(accessor, "swap_tensor", failing)
    with pytest.raises(KeyboardInterrupt):
        geometry.refresh(batch)
    assert len(calls) == 7
    assert whole(model, parameters)


@pytest.mark.parametrize("solver", ["heavy-ball", "cg", "pcg", "line-search"])
@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_failed_product_of_a_spread_refresh_does_not_change_what_is_learned(solver, at):
    if solver not in llqr.SOLVERS:
        pytest.skip(f"there is no {solver}")
    data, ends = batches(8), []
    for fails in (False, True):
        model, calls = mlp(), []

        def forward(module, x, calls=calls, fails=fails):
            calls.append(1)
            if fails and len(calls) == at:
                raise ArithmeticError
            return module(x)

        geometry = flat_geometry(
            model, cross_entropy, forward=forward, solver=solver, steps=4, every=4, engine="forward", spread=True
        )
        opt = llqr.LLQR(sgd(model), geometry)
        for batch in data:
            try:
                opt.step(closure_of(opt, model, batch), batch=data[0])
            except ArithmeticError:
                opt.step(closure_of(opt, model, batch), batch=data[0])
        assert not fails or len(calls) > at
        ends.append((weights(model), geometry.metric.named_factors(), geometry.refreshes))
    assert ends[0][2] == ends[1][2]
    assert_same_bits(ends[1][0], ends[0][0])
    assert_same_bits(ends[1][1], ends[0][1])


@pytest.mark.parametrize("where", ["average", "constrain", "assign"])
def test_a_failure_at_the_end_of_a_spread_refresh_does_not_lose_it(where, monkeypatch):
    data, ends = batches(6), []
    for fails in (False, True):
        model = mlp()
        opt = llqr.LLQR(sgd(model), quick_geometry(model, spread=True))
        original, failed = getattr(opt.geometry.metric, where), []

        def failing(*args, original=original, failed=failed, fails=fails):
            if fails and not failed:
                failed.append(1)
                raise ArithmeticError
            return original(*args)

        monkeypatch.setattr(opt.geometry.metric, where, failing)
        for batch in data:
            try:
                opt.step(closure_of(opt, model, batch), batch=data[0])
            except ArithmeticError:
                opt.step(closure_of(opt, model, batch), batch=data[0])
        ends.append((weights(model), opt.geometry.refreshes))
    assert ends[0][1] == ends[1][1] > 0
    assert_same_bits(ends[1][0], ends[0][0])

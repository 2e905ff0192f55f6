"""Steps that fail at a random call of torch, beside the same steps that do not."""

from __future__ import annotations

import warnings
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

import llqr
from geometries import flat_geometry
from llqr.distributed.ranks import RankError

cross_entropy = nn.functional.cross_entropy
FORMS = ("closure", "two calls")
REFRESHES = ("whole",)
CAPTURED = ("captured",)
EXCEPTIONS = (RuntimeError, MemoryError, ValueError, KeyboardInterrupt, torch.OutOfMemoryError, SystemExit)


class Failing(TorchFunctionMode):
    """Counts the calls of torch (`in_model`: only those of the network itself); the one with number `at` raises."""

    def __init__(self, at: int = 0, error: type[BaseException] = RuntimeError, in_model: bool = False) -> None:
        super().__init__()
        self.calls, self.at, self.error, self.in_model = 0, at, error, in_model
        self.failed = False
        self.suspended = in_model

    def __torch_function__(self, func, types, args=(), kwargs=None):
        # Leaving torch's own contexts must not fail, or nothing could be undone.
        if not self.suspended and not func.__name__.startswith(("_set_", "set_", "_enter_", "_exit_")):
            self.calls += 1
            if self.calls == self.at:
                self.failed = True
                raise self.error("on purpose")
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class State:
    weights: list[torch.Tensor]
    buffers: list[torch.Tensor]
    random: list[torch.Tensor]


class Training:
    """A small network with BatchNorm, its optimizer, and a step in either form."""

    def __init__(self, method: str, form: str, refresh: str) -> None:
        torch.manual_seed(0)
        self.device = torch.device("cuda" if refresh in CAPTURED else "cpu")
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).to(self.device)
        base = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
        settings = {"rho": 0.1} if "sam" in method else {}
        if "llqr" in method:
            settings["geometry"] = flat_geometry(
                self.model,
                cross_entropy,
                every=3,
                steps=3,
                lr=0.01,
                engine="forward" if refresh in CAPTURED else "double-backward",
                capture=refresh in CAPTURED,
                process_group=dist.group.WORLD if dist.is_initialized() else None,
            )
        self.opt = llqr.build(method, base, model=self.model, **settings)
        self.two_calls = form == "two calls" and self.opt.probe is not None
        self.mode = Failing()
        self.parameters = list(self.model.parameters())
        # A base that fails in the middle, or a restoration that does, is nobody's to undo; and after the base has
        # stepped, the step is done.
        self._suspend(self.opt.base, "step", until_the_end=True)
        self._suspend(self.opt._weights, "restore")
        self._suspend(self.opt._buffers, "restore")
        self.model.register_forward_pre_hook(lambda *_: self._in_model(True))
        self.model.register_forward_hook(lambda *_: self._in_model(False), always_call=True)

    def _in_model(self, inside: bool) -> None:
        if self.mode.in_model:
            self.mode.suspended = not inside

    def _suspend(self, owner, name: str, until_the_end: bool = False) -> None:
        original = getattr(owner, name)

        def suspended(*args, **settings):
            before, self.mode.suspended = self.mode.suspended, True
            try:
                return original(*args, **settings)
            finally:
                self.mode.suspended = before or until_the_end

        setattr(owner, name, suspended)

    def step(self, batch, mode: Failing) -> None:
        self.mode = mode

        def closure():
            self.opt.zero_grad()
            loss = cross_entropy(self.model(batch[0]), batch[1])
            loss.backward()
            return loss

        with mode:
            if not self.two_calls:
                self.opt.step(closure, batch=batch)
                return
            closure()
            self.opt.first_step(batch=batch)
            try:
                closure()
            except BaseException:
                self.opt.restore()
                raise
            self.opt.second_step()

    def state(self) -> State:
        """Weights, buffers and random states, as they are now."""
        random = [torch.get_rng_state()]
        if self.device.type == "cuda":
            random.append(torch.cuda.get_rng_state())
        return State([p.detach().clone() for p in self.parameters], [b.clone() for b in self.model.buffers()], random)

    @property
    def rejected(self) -> int:
        return 0 if self.opt.geometry is None else self.opt.geometry.failures

    def whole(self) -> bool:
        """Its own tensors, in the mode it was in."""
        own = all(a is b for a, b in zip(self.model.parameters(), self.parameters, strict=True))
        return own and all(module.training for module in self.model.modules())


class Pair:
    """Two equal trainings, of which one fails at every step, up to three times, and tries again.

    With several ranks: at the same call on all of them, or in one rank's network (`lonely`), where that rank fails, and
    the others too if it was in a refresh.
    """

    def __init__(self, method: str, form: str, refresh: str) -> None:
        self.failing, self.clean = Training(method, form, refresh), Training(method, form, refresh)
        self.steps, self.spent = 0, False

    def step(self, batch, draw, found: Counter, lonely: bool = False) -> None:
        batch = tuple(part.to(self.clean.device) for part in batch)
        counting = Failing(in_model=lonely)
        self.clean.step(batch, counting)
        before, after = self.failing.state(), self.clean.state()
        self.steps += 1
        if self._tries_again(batch, self._attempts(counting.calls, draw, lonely), before, after, found):
            self.failing.step(batch, Failing())
        if dist.is_initialized() and self.failing.rejected > self.clean.rejected:
            # Several ranks make a failed product NaN, so that none waits, and all keep the metric they have.
            found["refreshes without a product"] += 1
            self.spent = True
            return
        end = self.failing.state()
        same = _equal(end.weights, after.weights) and _equal(end.buffers, after.buffers)
        found["retries compared"] += 1
        found["retries that differ"] += not (same and self.failing.opt.steps == self.clean.opt.steps)

    def _attempts(self, calls: int, draw, lonely: bool) -> list[Failing]:
        """Drawn before the first of them, because a rank may need fewer than another."""
        attempts = []
        for _ in range(draw.randint(1, 3)):
            at, error = draw.randint(1, calls), draw.choice(EXCEPTIONS[:3] if lonely else EXCEPTIONS)
            here = not lonely or draw.randrange(dist.get_world_size()) == dist.get_rank()
            attempts.append(Failing(at if here else 0, error, in_model=lonely))
        return attempts

    def _tries_again(self, batch, attempts: list[Failing], before: State, after: State, found: Counter) -> bool:
        """Whether all attempts failed. What is done is not done again: a later one may end before its call comes."""
        for mode in attempts:
            if not self._fails(batch, mode, before, after, found):
                found["failures that did not come"] += mode is attempts[0] and mode.at > 0 and not mode.failed
                return False
        return True

    def _fails(self, batch, mode: Failing, before: State, after: State, found: Counter) -> bool:
        """Whether the step fails; what it leaves is counted."""
        failing = self.failing
        try:
            failing.step(batch, mode)
        except (mode.error, RankError):
            found["failures"] += 1
            now = failing.state()
            found["weights changed"] += not _equal(now.weights, before.weights)
            found["models not whole"] += not failing.whole()
            # The first pass may have updated its statistics once, or, failing in a BatchNorm, some of them.
            updated = zip(now.buffers, before.buffers, after.buffers, strict=True)
            found["buffers changed"] += not all(own.equal(old) or own.equal(new) for own, old, new in updated)
            found["random states changed"] += not _equal(now.random, before.random)
            for buffer, old in zip(failing.model.buffers(), before.buffers, strict=True):
                buffer.copy_(old)
            return True
        return False


def _equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(x.equal(y) for x, y in zip(a, b, strict=True))


@contextmanager
def quiet():
    """A refresh that does little says so; here it does not matter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", llqr.RefreshWarning)
        yield

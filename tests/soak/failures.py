"""Steps that fail at a random call of torch, beside the same steps that do not."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import llqr
from geometries import flat_geometry

cross_entropy = nn.functional.cross_entropy
FORMS = ("closure", "two calls")
REFRESHES = ("whole", "spread")
EXCEPTIONS = (RuntimeError, MemoryError, ValueError, KeyboardInterrupt, torch.OutOfMemoryError, SystemExit)


class Failing(TorchFunctionMode):
    """Counts the calls of torch; the one with the number `at` raises instead."""

    def __init__(self, at: int = 0, error: type[BaseException] = RuntimeError) -> None:
        super().__init__()
        self.calls, self.at, self.error = 0, at, error
        self.failed = self.suspended = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        # Leaving torch's own contexts must not fail, or nothing could be undone.
        context = func.__name__.startswith(("_set_", "set_", "_enter_", "_exit_"))
        if not self.suspended and not context:
            self.calls += 1
            if self.calls == self.at:
                self.failed = True
                raise self.error("on purpose")
        return func(*args, **(kwargs or {}))


class Training:
    """A small network with BatchNorm, its optimizer, and a step in either form."""

    def __init__(self, method: str, form: str, refresh: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
        base = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
        settings = {"rho": 0.1} if "sam" in method else {}
        if "llqr" in method:
            settings["geometry"] = flat_geometry(
                self.model,
                cross_entropy,
                every=3,
                steps=3,
                lr=0.01,
                engine="double-backward",
                spread=refresh == "spread",
            )
        self.opt = llqr.build(method, base, model=self.model, **settings)
        self.two_calls = form == "two calls" and self.opt.probe is not None
        self.mode = Failing()
        self.parameters = list(self.model.parameters())
        # A base that fails in the middle, or a restoration that does, is nobody's to undo; and after the base has
        # stepped, the step is done.
        self._suspend(self.opt.base, "step", until_the_end=True)
        self._suspend(self.opt._weights, "restore")
        self._suspend(self.opt._modules, "restore_buffers")

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

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.parameters]

    def buffers(self) -> list[torch.Tensor]:
        return [b.clone() for b in self.model.buffers()]

    def whole(self) -> bool:
        """Its own tensors, in the mode it was in."""
        own = all(a is b for a, b in zip(self.model.parameters(), self.parameters, strict=True))
        return own and all(module.training for module in self.model.modules())


class Pair:
    """Two equal trainings, of which one fails at every step and tries again."""

    def __init__(self, method: str, form: str, refresh: str) -> None:
        self.failing, self.clean = Training(method, form, refresh), Training(method, form, refresh)
        self.steps = 0

    def step(self, batch, draw, found: Counter) -> None:
        counting = Failing()
        self.clean.step(batch, counting)
        mode = Failing(draw.randint(1, counting.calls), draw.choice(EXCEPTIONS))
        failing = self.failing
        weights, buffers, random = failing.weights(), failing.buffers(), torch.get_rng_state()
        try:
            failing.step(batch, mode)
        except mode.error:
            found["failures"] += 1
            found["weights changed"] += not _equal(failing.weights(), weights)
            found["models not whole"] += not failing.whole()
            # The first pass may have updated its statistics once, or, failing in a BatchNorm, some of them.
            updated = zip(failing.buffers(), buffers, self.clean.buffers(), strict=True)
            found["buffers changed"] += not all(now.equal(before) or now.equal(after) for now, before, after in updated)
            found["random states changed"] += not torch.get_rng_state().equal(random)
            for buffer, before in zip(failing.model.buffers(), buffers, strict=True):
                buffer.copy_(before)
            failing.step(batch, Failing())
        found["failures that did not come"] += not mode.failed
        same = _equal(failing.weights(), self.clean.weights()) and _equal(failing.buffers(), self.clean.buffers())
        found["retries that differ"] += not (same and failing.opt.steps == self.clean.opt.steps)
        self.steps += 1


def _equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(x.equal(y) for x, y in zip(a, b, strict=True))


@contextmanager
def quiet():
    """A refresh that does little says so; here it does not matter."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", llqr.RefreshWarning)
        yield

"""torch's own matrix of optimizers (`optim_db`: every class, every setting that torch tests) under every method."""

import copy
import io
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import llqr
from traps.training import assert_same_bits, assert_same_state, weights

# Otherwise the import forbids other tests in this process to set flags such as `cudnn.benchmark`.
with mock.patch("torch.backends.disable_global_flags"):
    from torch.testing._internal.common_optimizers import OptimizerInput, optim_db

METHODS = ("sam", "asam", "fishersam", "fsam", "llqr", "llqr+sam")
REFUSED = {"LBFGS": r"^base: LBFGS calls the closure by itself", "SparseAdam": r"has a sparse gradient|is sparse, "}
STEPS = 3


def cases() -> list:
    """The first and the last setting of every class; those between are in the slow lane."""
    found = []
    for info in optim_db:
        settings = info.optim_inputs_func(device="cpu")
        for place, setting in enumerate(settings):
            name = f"{info.optim_cls.__name__}-{setting.desc.replace(' ', '_')}"
            quick = place in (0, len(settings) - 1)
            found.append(pytest.param(info.optim_cls, setting, id=name, marks=[] if quick else pytest.mark.slow))
    return found


class Training:
    """A network and the method over the base optimizer: matrices only, because Muon takes no others."""

    def __init__(self, kind: Callable, setting: OptimizerInput, method: str) -> None:
        torch.manual_seed(0)
        self.sparse = kind.__name__ == "SparseAdam"
        first = nn.Embedding(12, 6, sparse=True) if self.sparse else nn.Linear(12, 6, bias=False)
        self.model = nn.Sequential(first, nn.Tanh(), nn.Linear(6, 3, bias=False))
        self.x = torch.randint(12, (16,)) if self.sparse else torch.randn(16, 12)
        self.y = torch.randint(3, (16,))
        parameters = first.parameters() if self.sparse else self.model.parameters()
        base = kind(parameters, **copy.deepcopy(setting.kwargs))
        geometry = None
        if method.startswith("llqr"):
            geometry = llqr.Geometry(self.model, F.cross_entropy, every=4, inner=llqr.Inner(steps=3))
        settings = {} if method == "llqr" else {"rho": 0.01}
        self.opt = llqr.build(method, base, geometry=geometry, **settings)

    def closure(self) -> Tensor:
        self.opt.zero_grad()
        loss = F.cross_entropy(self.model(self.x), self.y)
        loss.backward()
        return loss

    def train(self) -> list[float]:
        return [float(self.opt.step(self.closure, batch=(self.x, self.y))) for _ in range(STEPS)]

    def saved(self) -> io.BytesIO:
        file = io.BytesIO()
        torch.save([self.model.state_dict(), self.opt.state_dict()], file)
        file.seek(0)
        return file

    def assert_same(self, other: "Training") -> None:
        assert_same_bits(weights(self.model), weights(other.model))
        assert_same_state(self.opt.state_dict(), other.opt.state_dict())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("kind", "setting"), cases())
def test_the_loss_falls_and_a_resumed_or_copied_run_is_the_same(kind, setting, method):
    if kind.__name__ in REFUSED:
        with pytest.raises(TypeError, match=REFUSED[kind.__name__]):
            Training(kind, setting, method).train()
        return
    straight = Training(kind, setting, method)
    losses = straight.train()
    copied, file = copy.deepcopy(straight), straight.saved()
    losses += straight.train()
    copied.train()
    copied.assert_same(straight)
    resumed = Training(kind, setting, method)
    model, opt = torch.load(file, weights_only=True)
    resumed.model.load_state_dict(model)
    resumed.opt.load_state_dict(opt)
    resumed.train()
    resumed.assert_same(straight)
    assert (losses[-1] > losses[0]) == bool(setting.kwargs.get("maximize"))

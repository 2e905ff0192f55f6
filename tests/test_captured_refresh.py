"""A refresh that is replayed is the refresh, by graphs that are imitated; real ones are tested in test_cuda.py."""

import gc
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from geometries import flat_geometry
from live_bytes import LiveBytes
from llqr import cuda, geometry
from references import relative_error

#: What no graph can hold: the host reads a number, or brings one.
REFUSED = {"_local_scalar_dense", "equal", "is_nonzero", "lift_fresh", "masked_select", "nonzero"}


class ImitatedGraph(TorchDispatchMode):
    """Records the operators that run while it is entered; a replay writes what they give to where it was."""

    def __init__(self):
        super().__init__()
        self._operators = []

    def pool(self):
        return None

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function.overloadpacket.__name__ not in REFUSED
        made = function(*args, **(kwargs or {}))
        if not function.is_view:
            self._operators.append((function, args, kwargs or {}, made))
        return made

    @torch.no_grad()
    def replay(self):
        for function, args, kwargs, before in self._operators:
            made = function(*args, **kwargs)
            for place, now in zip(pytree.tree_leaves(before), pytree.tree_leaves(made), strict=True):
                if isinstance(place, torch.Tensor) and place.data_ptr() != now.data_ptr():
                    place.detach().copy_(now)


class OneStream:
    def run(self, each, sizes, alone):
        return [compute() for compute in each]


@pytest.fixture(autouse=True)
def _imitated(monkeypatch):
    @contextmanager
    def capturing(pool=None):
        with ImitatedGraph() as graph:
            yield graph

    monkeypatch.setattr(cuda, "capturing", capturing)
    monkeypatch.setattr(cuda, "warming_up", nullcontext)
    monkeypatch.setattr(cuda, "Branches", OneStream)
    monkeypatch.setattr(geometry, "check_capture", lambda *_: None)


@pytest.mark.parametrize(
    ("loss", "settings"), [(F.cross_entropy, {"product_every": 3, "damping": "10%"}), (F.mse_loss, {"solver": "pcg"})]
)
@pytest.mark.parametrize("divergence", ["ngd", "newton"])
@pytest.mark.parametrize("engine", ["forward", "double-backward", "one-sided-differences", "linearised"])
def test_a_replayed_refresh_is_the_refresh(engine, divergence, loss, settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()
    settings = {"structure": "diagonal" if "solver" in settings else "e-kfac", "ema": 0.5, "steps": 6} | settings
    made = [
        flat_geometry(model, loss, engine=engine, divergence=divergence, capture=capture, **settings)
        for capture in (False, True)
    ]
    for _ in range(2):
        x = torch.randn(8, 4, dtype=torch.float64)
        y = torch.randint(3, (8,)) if loss is F.cross_entropy else torch.randn(8, 3, dtype=torch.float64)
        eager, captured = (own.refresh((x, y)) for own in made)
        assert captured.accepted
        assert (captured.loss, captured.objective_after) == pytest.approx((eager.loss, eager.objective_after))
        with torch.no_grad():  # the graphs read the parameters in place
            for parameter in model.parameters():
                parameter.add_(0.01)
    factors = [own.metric.named_factors() for own in made]
    assert max(relative_error(factors[1][name], factors[0][name]) for name in factors[0]) < 1e-10


@pytest.mark.parametrize("moved", ["parameters", "buffer"])
def test_graphs_are_captured_again_once_the_models_tensors_have_moved(moved):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()
    batch = torch.randn(8, 4, dtype=torch.float64), torch.randint(3, (8,))
    eager, captured = (
        flat_geometry(model, F.cross_entropy, engine="double-backward", steps=2, capture=capture)
        for capture in (False, True)
    )
    assert captured.refresh(batch).loss == pytest.approx(eager.refresh(batch).loss)
    if moved == "parameters":  # as `.to` does, to a device and back, and `vector_to_parameters`
        for parameter in model.parameters():
            parameter.data = 1.5 * parameter.data
    else:
        model[1].running_mean = torch.ones(5, dtype=torch.float64)
    assert captured.refresh(batch).loss == pytest.approx(eager.refresh(batch).loss)


def test_a_warm_up_is_free_before_the_next_and_before_the_graphs_are_made(monkeypatch):
    monkeypatch.setattr(cuda, "capturing", lambda *_: nullcontext(ImitatedGraph()))
    layers = [layer for _ in range(16) for layer in (nn.Linear(32, 32), nn.Tanh())]
    model, batch = nn.Sequential(*layers), (torch.randn(2048, 32), torch.randn(2048, 32))
    peaks = []
    for capture in (False, True):
        own = flat_geometry(model, F.mse_loss, engine="double-backward", steps=2, capture=capture)
        gc.collect()
        with LiveBytes([*model.parameters(), *batch]) as live:
            own.refresh(batch)
        peaks.append(live.peak)
    assert peaks[1] < 1.2 * peaks[0]

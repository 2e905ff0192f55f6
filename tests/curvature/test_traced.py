"""A product traced once serves other weights, statistics and batches of the same shapes, and no others."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from geometries import flat_geometry
from llqr.curvature import NGD, Problem, traced
from llqr.curvature.traced import Trace, Traces
from references import flat, quadratic_model, relative_error, trainable


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double().eval()
    model[0].bias.requires_grad_(False)
    return model


def batch(rows=8):
    return torch.randn(rows, 5, dtype=torch.float64), torch.randint(3, (rows,))


def problem(model, drawn):
    return Problem(model, F.cross_entropy, drawn, trainable(model))


def test_a_trace_serves_other_weights_statistics_and_batches():
    model = network()
    trace = Trace(problem(model, batch()), NGD)
    with torch.no_grad():
        for tensor in [*model.parameters(), model[1].running_mean, model[1].running_var]:
            tensor.copy_(torch.rand_like(tensor) + 0.5)  # the frozen bias too
    moved = problem(model, batch())
    assert trace.fits(moved)
    v = {name: torch.randn_like(p) for name, p in moved.parameters.items()}
    with torch.no_grad():
        found, exact = trace.linearise(moved), quadratic_model(moved, NGD, "forward")
        assert found.loss.item() == pytest.approx(exact.loss.item(), rel=1e-12)
        assert relative_error(flat(found.gradient), flat(exact.gradient)) < 1e-12
        assert relative_error(flat(found.product(v)), flat(exact.product(v))) < 1e-12


def test_other_shapes_are_traced_anew():
    model = network()
    trace = Trace(problem(model, batch()), NGD)
    assert not trace.fits(problem(model, batch(rows=7)))
    by_trace, exact = (
        flat_geometry(model, F.cross_entropy, steps=3, ema=0.0, engine=engine) for engine in ("linearised", "forward")
    )
    for rows in (8, 7, 7):
        drawn = batch(rows)
        for geometry in (by_trace, exact):
            geometry.refresh(drawn)
    for name, factor in exact.metric.named_factors().items():
        assert relative_error(by_trace.metric.named_factors()[name], factor) < 1e-10


def test_a_shape_is_traced_once(monkeypatch):
    model, made = nn.Linear(5, 3).double(), []  # every trace takes a while
    traces = Traces(NGD)
    monkeypatch.setattr(traced, "KEPT", 4)
    monkeypatch.setattr(Trace, "__init__", _counting(Trace.__init__, made))
    for _ in range(3):
        for rows in (8, 7, 6):
            traces.linearise(problem(model, batch(rows)))
    assert len(made) == 3
    for rows in range(2, 8):
        traces.linearise(problem(model, batch(rows)))
    assert len(traces.kept) == 4


@pytest.mark.slow
def test_only_the_first_shapes_are_traced(monkeypatch):
    """torch keeps the code of every trace: 200 shapes took 100 MiB. Products stay exact, with fused attention too."""
    made = []
    monkeypatch.setattr(Trace, "__init__", _counting(Trace.__init__, made))
    torch.manual_seed(0)
    model = Attending()
    traces = Traces(NGD)
    for rows in range(2, 2 + traced.KEPT + 1):
        drawn = problem(model, (torch.randn(rows, 4, 8), torch.randint(8, (rows,))))
        found = traces.linearise(drawn)
    assert len(made) == traced.KEPT
    expected = Trace(drawn, NGD).linearise(drawn)
    v = {name: torch.randn_like(p) for name, p in drawn.parameters.items()}
    assert relative_error(flat(found.gradient), flat(expected.gradient)) < 1e-5
    assert relative_error(flat(found.product(v)), flat(expected.product(v))) < 1e-4


class Attending(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)

    def forward(self, x):
        return F.scaled_dot_product_attention(*3 * (super().forward(x)[:, None],)).mean((1, 2))


def _counting(original, made):
    def init(self, *args, **settings):
        made.append(1)
        original(self, *args, **settings)

    return init


def test_a_product_repeats_nothing_that_does_not_depend_on_v():
    trace = Trace(problem(network(), batch()), NGD)
    kernels = [node.target for node in trace._each.graph.nodes if node.op == "call_function"]
    # J v: dW x twice and W dx twice (the input's dx is zero, which torch multiplies all the same); J^T u: two for the
    # weights, one for the activations. The two of the forward pass are not among them.
    assert kernels.count(torch.ops.aten.mm.default) == 7
    assert torch.ops.aten.addmm.default not in kernels


def test_a_geometry_with_a_trace_can_be_pickled():
    torch.manual_seed(0)
    batch = torch.randn(8, 4), torch.randint(3, (8,))
    geometry = flat_geometry(nn.Linear(4, 3), F.cross_entropy, engine="linearised", steps=2)
    geometry.refresh(batch)
    copied = pickle.loads(pickle.dumps(geometry))
    assert copied.refresh(batch).objective_after == geometry.refresh(batch).objective_after


def test_micro_batches_are_refused():
    with pytest.raises(ValueError, match="micro_batch: not with engine='linearised'"):
        flat_geometry(network(), F.cross_entropy, engine="linearised", micro_batch=4)


def test_resuming_with_micro_batches_chooses_another_engine():
    geometry = flat_geometry(network(), F.cross_entropy, micro_batch=4)
    saved = flat_geometry(network(), F.cross_entropy, engine="linearised").state_dict()
    geometry.load_state_dict(saved)
    assert geometry.refresh(batch()).accepted
    assert geometry.engine == "forward"


class Branching(nn.Linear):
    def forward(self, x):
        return super().forward(x if x.sum() > 0 else -x)


def test_a_branch_on_the_data_is_not_frozen_into_the_trace():
    model = Branching(5, 3).double()
    with pytest.raises(RuntimeError, match="data-dependent"):
        flat_geometry(model, F.cross_entropy, engine="linearised").refresh(batch())

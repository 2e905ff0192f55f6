"""A fused step is the step: torch's SGD on clipped slopes is the reference."""

import shutil

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from geometries import flat_geometry
from llqr import Inner, Metric
from llqr.metric import STRUCTURES
from llqr.solvers import fused_descent
from llqr.solvers.fused_descent import descend
from quadratics import solver_for
from references import relative_error

STACKED = sorted(STRUCTURES.keys() - {"diagonal", "scalar", "identity"})


@pytest.fixture(autouse=True)
def as_written(monkeypatch):
    """The functions as they are, not compiled, on stacks of any size."""
    monkeypatch.setattr(fused_descent, "_compiled", lambda function: function)
    monkeypatch.setattr(fused_descent, "LARGE", 1)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(16, 6, generator=generator), torch.randint(3, (16,), generator=generator)


@given(
    seed=st.integers(0, 2**16),
    shape=st.sampled_from([(1, 8, 8), (3, 5, 7), (4, 64, 128), (2, 100, 100)]),
    limit=st.sampled_from([0.0, 0.3, 5.0, 1e6]),
    spoiled=st.integers(0, 3),
)
def test_a_step_is_torchs_on_what_is_clipped(seed, shape, limit, spoiled):
    generator = torch.Generator().manual_seed(seed)
    factor, momentum, slope = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    for value in [float("nan"), float("inf"), -float("inf")][:spoiled]:
        slope.view(-1)[torch.randint(slope.numel(), (1,), generator=generator)] = value
    finite = torch.where(slope.isfinite(), slope, 0)
    norms = torch.stack([block.norm() for block in finite])
    shrink = torch.minimum(torch.ones(()), limit / norms.clamp_min(torch.finfo(torch.float64).tiny))
    expected = 0.9 * momentum + finite * shrink.view(-1, 1, 1)
    moved = factor - 0.1 * expected
    descend(factor, momentum, slope, limit, lr=0.1, beta=0.9)
    assert relative_error(momentum, expected) < 1e-12
    assert relative_error(factor, moved) < 1e-12


def assert_a_refresh_learns_the_same(kind):
    model = network().double()
    x, y = batch()
    plain, fused = (
        flat_geometry(model, F.cross_entropy, structure=kind, engine="forward", compile=c) for c in (False, True)
    )
    for step in range(2):
        reports = [geometry.refresh((x.double() + step, y)) for geometry in (plain, fused)]
        assert reports[1].objective_after == pytest.approx(reports[0].objective_after, rel=1e-10)
    pairs = zip(plain.metric.named_factors().values(), fused.metric.named_factors().values(), strict=True)
    assert max(relative_error(b, a) for a, b in pairs) < 1e-10


@pytest.mark.parametrize("kind", STACKED)
def test_a_refresh_learns_the_same(kind):
    assert_a_refresh_learns_the_same(kind)


def test_small_factors_vectors_and_other_solvers_are_torchs(monkeypatch):
    metric = Metric(network(), structure="kfac")
    assert not any(solver_for(metric, Inner())._momenta)
    assert not any(solver_for(metric, Inner("adam"), fuse=True)._momenta)

    def fused():
        momenta = solver_for(metric, Inner(), fuse=True)._momenta
        return [(group.name, list(own)) for group, own in zip(metric.groups, momenta, strict=True)]

    assert fused() == [("kfac", ["out", "in"]), ("diagonal", []), ("kfac", ["out", "in"])]
    monkeypatch.setattr(fused_descent, "LARGE", 6 * 6)
    assert fused() == [("kfac", ["out", "in"]), ("diagonal", []), ("kfac", ["in"])]


def test_a_group_may_be_stepped_in_part(monkeypatch):
    """The 3x3 factor of the last layer by torch, the 6x6 one beside it fused."""
    monkeypatch.setattr(fused_descent, "LARGE", 6 * 6)
    assert_a_refresh_learns_the_same("e-kfac")


def test_bfloat16_slopes_step_float32_factors():
    factor, momentum = torch.ones(2, 8, 8), torch.zeros(2, 8, 8)
    descend(factor, momentum, torch.full((2, 8, 8), 0.125, dtype=torch.bfloat16), limit=0.5, lr=1.0, beta=0.9)
    assert momentum.dtype == torch.float32
    assert torch.allclose(momentum, torch.full_like(momentum, 0.0625))  # a norm of 1 is bounded by a half
    assert torch.allclose(factor, 1 - momentum)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler here")
def test_compiled_for_several_shapes_and_dtypes(monkeypatch):
    """Once for a single block, once for several, in both dtypes; not for every shape and learning rate."""
    monkeypatch.undo()
    monkeypatch.setattr(fused_descent, "CHUNK", 64)  # large factors have many chunks
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=4, fail_on_recompile_limit_hit=True):
        for dtype in (torch.bfloat16, torch.float32):
            for shape in ((3, 16, 16), (1, 16, 32), (5, 10, 8), (2, 64, 128), (4, 33, 18), (1, 100, 100), (64, 64, 64)):
                for lr in (1e-3, 2e-3):
                    slope = torch.randn(shape).to(dtype)
                    ours, theirs = ([torch.ones(shape), torch.ones(shape)] for _ in range(2))
                    descend(*ours, slope, limit=5.0, lr=lr, beta=0.9)
                    with monkeypatch.context() as context:
                        context.setattr(fused_descent, "_compiled", lambda function: function)
                        descend(*theirs, slope, limit=5.0, lr=lr, beta=0.9)
                    assert max(map(relative_error, ours, theirs)) < 1e-6

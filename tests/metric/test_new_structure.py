"""A new structure is two methods and one line: two are defined here, registered, applied and learned."""

import pytest
import torch
import torch.nn.functional as F

import llqr
from geometries import flat_geometry
from llqr import STRUCTURES, Flat, Metric, Structure
from llqr.inner import Objective
from metric.test_metric import perturbed, random_like
from quadratics import setting, shaken, slopes_of
from references import dense_metric, flat, relative_error, trainable
from small_models import case, mlp, vit


class LowRank(Structure):
    """`U G = G + A B^T G` with tall factors `A` and `B` of two columns."""

    name = "low-rank"

    def identity(self, dtype, device):
        a = torch.ones(self.k, self.m, 2, dtype=dtype, device=device)
        return {"a": a, "b": torch.zeros_like(a)}

    def apply(self, factors, g):
        return g + factors["a"] @ (factors["b"].mT @ g)


class UnevenLowRank(LowRank):
    """Of a slope that autograd returns transposed in memory; `LowRank` starts where it is zero for a softmax."""

    name = "uneven-low-rank"

    def identity(self, dtype, device):
        columns = torch.arange(self.k * self.m * 2, dtype=dtype, device=device)
        return super().identity(dtype, device) | {"a": columns.view(self.k, self.m, 2).cos()}


class ScaledDiagonal(Flat):
    """One number per entry times one number per layer."""

    name = "scaled-diagonal"

    def identity(self, dtype, device):
        sizes = {"entries": self.size, "layers": len(self.layers)}
        return {name: torch.ones(size, dtype=dtype, device=device) for name, size in sizes.items()}

    def apply(self, factors, g):
        return self.scale_layers(factors["entries"] * g, factors["layers"])


NEW = [LowRank, UnevenLowRank, ScaledDiagonal]


@pytest.fixture(params=NEW, ids=lambda structure: structure.name)
def kind(request, monkeypatch):
    """The one line that registers it."""
    monkeypatch.setitem(STRUCTURES, request.param.name, request.param)
    return request.param.name


def test_it_acts_as_its_dense_form(kind):
    model = vit(fused=True)
    metric, grads = Metric(model, structure=kind), random_like(trainable(model))
    assert set(metric.kinds.values()) == ({kind} if STRUCTURES[kind].takes_vectors else {kind, "diagonal"})
    assert relative_error(dense_metric(metric, trainable(model)), torch.eye(flat(grads).numel())) == 0
    perturbed(metric)
    assert relative_error(flat(metric.apply(grads)), dense_metric(metric, trainable(model)) @ flat(grads)) < 1e-12


def test_its_slopes_are_those_of_the_dense_objective(kind):
    metric, quadratic = setting(kind)
    factors = shaken(metric)
    here = Objective(metric, quadratic).at(factors)
    value, expected = slopes_of(metric, quadratic, factors)
    assert relative_error(here.value, value) < 1e-12
    for own, slopes in zip(expected, here.slopes(), strict=True):
        for name, slope in own.items():
            assert relative_error(slopes[name], slope) < 1e-10


def test_it_is_learned(kind):
    drawn = case("mlp")
    geometry = flat_geometry(drawn.model, F.cross_entropy, structure=kind, engine="double-backward")
    report = geometry.refresh(drawn.batch)
    assert report.accepted
    assert report.objective_after < report.objective_before
    opt = llqr.LLQR(torch.optim.SGD(drawn.model.parameters(), lr=0.1), geometry)
    before = [p.detach().clone() for p in drawn.model.parameters()]
    F.cross_entropy(drawn.model(drawn.batch[0]), drawn.batch[1]).backward()
    grads = {name: p.grad.clone() for name, p in drawn.model.named_parameters()}
    opt.step(batch=drawn.batch)
    for (name, parameter), old in zip(drawn.model.named_parameters(), before, strict=True):
        torch.testing.assert_close(parameter.detach(), old - 0.1 * geometry.metric.apply(grads)[name])


def test_it_is_saved_and_counted(kind):
    first, second = perturbed(Metric(mlp(), structure=kind)), Metric(mlp(), structure=kind)
    second.load_state_dict(first.state_dict())
    assert all(factor.equal(second.named_factors()[name]) for name, factor in first.named_factors().items())
    assert sum(factor.numel() for factor in first.named_factors().values()) == first.stored()


def test_bounds_are_refused_until_it_has_a_constraint(kind, monkeypatch):
    with pytest.raises(ValueError, match=f"^bounds: the structure '{kind}' has no `project`"):
        Metric(mlp(), structure=kind, bounds=(0.5, 2.0))
    monkeypatch.setattr(STRUCTURES[kind], "project", lambda self, factors, lower, upper: factors)
    Metric(mlp(), structure=kind, bounds=(0.5, 2.0))


def test_normalising_is_refused_until_it_can_be_scaled(kind, monkeypatch):
    def normalising():
        return llqr.Geometry(mlp(), F.cross_entropy, structure=kind, inner=llqr.Inner(normalise=True))

    with pytest.raises(ValueError, match=f"^normalise: the structure '{kind}' has no `times`.* leave normalise out"):
        normalising()
    monkeypatch.setattr(STRUCTURES[kind], "times", lambda self, factors, number: factors)
    normalising()


def test_a_long_side_falls_back_where_it_says_so(kind, monkeypatch):
    assert Metric(mlp(), structure=kind, max_side=2).kinds["0.weight"] == kind  # nothing said: any length is fine
    monkeypatch.setattr(STRUCTURES[kind], "fallback", "scalar")
    with pytest.warns(UserWarning, match=rf"max_side=2: {kind} -> scalar for 0.weight \(6, 4\)"):
        assert Metric(mlp(), structure=kind, max_side=2).kinds["0.weight"] == "scalar"
    monkeypatch.setattr(STRUCTURES[kind], "longest_side", classmethod(lambda cls, block: 2))
    assert Metric(mlp(), structure=kind, max_side=2).kinds["0.weight"] == kind

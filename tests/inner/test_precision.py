"""The factors' products in bfloat16: how far that is from float32, and what stays in float32."""

import pytest
import torch
from torch import nn

from llqr import Inner, Metric
from llqr.inner import Objective
from llqr.metric import STRUCTURES
from quadratics import solve, solver_for
from references import relative_error

KINDS = sorted(STRUCTURES.keys() - {"identity", "dense"})
LOWERED = [kind for kind in KINDS if STRUCTURES[kind].multiplies]


class Model:
    """`H = diag(h) + 5 u u^T` on a two-layer network in float32, large enough for typical rounding."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.network = nn.Sequential(nn.Linear(48, 96), nn.Tanh(), nn.Linear(96, 32))
        shapes = {name: parameter.shape for name, parameter in self.network.named_parameters()}
        self.loss = torch.zeros(())
        self.gradient = {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        self.h = {name: 3 * torch.rand(shape, generator=generator) for name, shape in shapes.items()}
        self.u = {n: torch.randn(shape, generator=generator) / shape.numel() ** 0.5 for n, shape in shapes.items()}

    def product(self, v):
        assert {part.dtype for part in v.values()} == {torch.float32}
        along = 5 * sum((self.u[name] * v[name]).sum() for name in v)
        return {name: self.h[name] * v[name] + along * self.u[name] for name in v}


def objectives(kind):
    model = Model()
    metric = Metric(model.network, structure=kind)
    return metric, *(Objective(metric, model, 0.1, precision) for precision in (None, torch.bfloat16))


def shaken(metric):
    generator = torch.Generator().manual_seed(1)
    return [
        {name: factor + 0.05 * torch.randn(factor.shape, generator=generator) for name, factor in group.items()}
        for group in metric.factors()
    ]


def errors(found, expected):
    return [relative_error(a[name], b[name]) for a, b in zip(found, expected, strict=True) for name in b]


def test_what_is_multiplied():
    assert LOWERED == ["e-kfac", "e-kfac-channels", "e-kfac-one-sided", "e-kfac-psd", "kfac", "kfac-psd"]


@pytest.mark.parametrize("kind", LOWERED)
def test_one_evaluation_is_within_a_few_roundings(kind):
    """bfloat16 rounds by up to 2^-9; `U g` is four products in a row, a slope seven."""
    metric, exact, lowered = objectives(kind)
    factors = shaken(metric)
    wide, narrow = exact.at(factors), lowered.at(factors)
    assert {part.dtype for part in narrow.Ug + narrow.residual} == {torch.float32}
    assert 1e-4 < max(relative_error(a, b) for a, b in zip(narrow.Ug, wide.Ug, strict=True)) < 4 * 2**-9
    assert 1e-4 < max(errors(narrow.slopes(), wide.slopes())) < 7 * 2**-9
    assert float(narrow.value) == pytest.approx(float(wide.value), rel=4 * 2**-9)


@pytest.mark.parametrize("kind", LOWERED)
def test_what_is_learned_is_within_a_percent(kind):
    model = Model()
    metric = Metric(model.network, structure=kind)
    wide, narrow = (solve(metric, model, Inner(), 0.1, precision) for precision in (None, torch.bfloat16))
    start = metric.factors()
    moved = [
        [{name: f[name] - s[name] for name in s} for f, s in zip(solution.factors, start, strict=True)]
        for solution in (narrow, wide)
    ]
    assert 1e-4 < max(errors(*moved)) < 0.01
    exact = Objective(metric, model, 0.1)
    applied = zip(exact.at(narrow.factors).Ug, exact.at(wide.factors).Ug, strict=True)
    assert max(relative_error(a, b) for a, b in applied) < 0.003
    assert float(narrow.before) == float(wide.before)
    assert float(narrow.after) == pytest.approx(float(wide.after), rel=1e-3)
    assert float(narrow.after) == float(exact.at(narrow.factors).value)


@pytest.mark.parametrize("kind", KINDS)
def test_factors_momentum_and_what_is_not_multiplied_stay_in_float32(kind):
    metric, exact, lowered = objectives(kind)
    factors = shaken(metric)
    wide, narrow = exact.at(factors), lowered.at(factors)
    for group, a, b, slopes in zip(metric.groups, narrow.Ug, wide.Ug, narrow.slopes(), strict=True):
        assert group.multiplies or a.equal(b)
        for slope in slopes.values():
            assert slope.dtype == (torch.bfloat16 if group.multiplies else torch.float32)
    descent = solver_for(metric, Inner())
    descent.step(lowered)
    assert {factor.dtype for group in descent.factors for factor in group.values()} == {torch.float32}
    assert {momentum.dtype for momentum in descent._memory} == {torch.float32}


@pytest.mark.parametrize("solver", ["heavy-ball", "adam"])
def test_every_solver_takes_it(solver):
    model = Model()
    metric = Metric(model.network, structure="kfac")
    solution = solve(metric, model, Inner(solver, steps=10), precision=torch.bfloat16)
    assert float(solution.after) < float(solution.before)
    assert {factor.dtype for group in solution.factors for factor in group.values()} == {torch.float32}

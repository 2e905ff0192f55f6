"""Preconditioned conjugate gradients reach the dense minimum; damping, scale and moving average."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from geometries import flat_geometry
from llqr import Geometry, Inner
from llqr.inner import Objective
from llqr.metric import STRUCTURES
from quadratics import setting, shaken, solve
from references import dense_metric, relative_error
from small_models import case

KINDS = sorted(STRUCTURES.keys() - {"identity"})
ENTRYWISE = [kind for kind in KINDS if STRUCTURES[kind].scales_entries]


def minimiser(metric, quadratic, damping):
    """The lowest `J` and its factors: `A u = b`, from the Hessian and the gradient of the dense `J` at zero."""
    (shape,) = {factor.shape for group in metric.factors() for factor in group.values()}

    def dense(u):
        return quadratic.value(dense_metric(metric, quadratic.like, [{metric.groups[0].name: u}]), damping)

    zero = torch.zeros(shape, dtype=torch.float64)
    a = torch.autograd.functional.hessian(dense, zero)
    b = -torch.autograd.functional.jacobian(dense, zero)
    best = torch.linalg.solve(a, b)
    return dense(best), best


@pytest.mark.parametrize("damping", [0.0, 0.5])
@pytest.mark.parametrize("kind", ENTRYWISE)
def test_it_reaches_the_dense_minimiser(kind, damping):
    metric, quadratic = setting(kind)
    shaken(metric)
    solution = solve(metric, quadratic, Inner("pcg", steps=120), damping)
    lowest, best = minimiser(metric, quadratic, damping)
    (found,) = (factor for group in solution.factors for factor in group.values())
    assert float(solution.after) == pytest.approx(float(lowest), rel=1e-10)
    assert relative_error(found, best) < 1e-7


@pytest.mark.parametrize("kind", ENTRYWISE)
def test_the_first_step_is_the_best_multiple(kind):
    metric, quadratic = setting(kind)
    start = shaken(metric)
    solution = solve(metric, quadratic, Inner("pcg", steps=1))
    g, u = quadratic.g, dense_metric(metric, quadratic.like, start)
    linear, curved = g @ (u @ g), (u @ g) @ quadratic.h @ (u @ g)
    for own, before in zip(solution.factors, start, strict=True):
        assert all(relative_error(factor, before[name] * linear / curved) < 1e-11 for name, factor in own.items())


def test_it_never_raises_the_objective_of_an_indefinite_model():
    metric, quadratic = setting("diagonal", definite=False)
    shaken(metric)
    values = [float(solve(metric, quadratic, Inner("pcg", steps=steps)).after) for steps in range(1, 8)]
    assert all(later <= earlier + 1e-9 * abs(earlier) for earlier, later in pairwise(values))


def test_it_makes_no_product_for_the_last_objective():
    metric, quadratic = setting("diagonal")
    solution = solve(metric, quadratic, Inner("pcg", steps=6))
    assert quadratic.products == 6
    expected = quadratic.value(dense_metric(metric, quadratic.like, solution.factors))
    assert float(solution.after) == pytest.approx(float(expected), rel=1e-11)


@pytest.mark.parametrize("kind", ["kfac", "e-kfac", "dense"])
def test_it_refuses_what_does_not_scale_entries(kind):
    metric, quadratic = setting(kind)
    with pytest.raises(ValueError, match=f"solver: 'pcg' is for structures that scale entries .* {kind} does not"):
        solve(metric, quadratic, Inner("pcg"))


# -- damping -----------------------------------------------------------------------------------------------------------


def test_a_share_of_the_curvature():
    metric, quadratic = setting("diagonal")
    g, h = quadratic.g, quadratic.h
    absolute = 0.25 * (g @ h @ g) / (g @ g)
    relative, fixed = (
        Objective(metric, quadratic, damping).at(metric.factors()).value for damping in ("25%", float(absolute))
    )
    assert float(relative) == pytest.approx(float(fixed), rel=1e-12)


@pytest.mark.parametrize("damping", [-1, "much", "-10%", True, None, float("nan"), float("inf")])
def test_other_dampings_are_refused(damping):
    with pytest.raises(ValueError, match="damping: expected a number >= 0, or a share of the curvature such as '10%'"):
        Geometry(case("mlp").model, F.cross_entropy, damping=damping)


# -- scale and average -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_multiple_of_the_metric(kind):
    metric, quadratic = setting(kind)
    factors = shaken(metric)
    number = torch.tensor(2.5, dtype=torch.float64)
    scaled = [group.times(own, number) for group, own in zip(metric.groups, factors, strict=True)]
    expected = 2.5 * dense_metric(metric, quadratic.like, factors)
    assert relative_error(dense_metric(metric, quadratic.like, scaled), expected) < 1e-12


@pytest.mark.parametrize("ema", [0.0, 0.5])
@pytest.mark.parametrize("kind", ["scalar", "diagonal", "kfac", "e-kfac", "e-kfac-one-sided"])
def test_a_normalised_metric_keeps_the_length_along_the_gradient(kind, ema):
    """Also as an average: that of products of factors is not the product of their averages."""
    drawn = case("mlp")
    geometry = flat_geometry(drawn.model, F.cross_entropy, structure=kind, steps=4, lr=0.05, normalise=True, ema=ema)
    for _ in range(2):
        assert geometry.refresh(drawn.batch).accepted
    with geometry.quadratic_model(drawn.batch) as model:
        g, Ug = model.gradient, geometry.metric.apply(model.gradient)
    along, square = (sum((part * other[name]).sum() for name, part in g.items()) for other in (Ug, g))
    assert float(along) == pytest.approx(float(square), rel=1e-10)


def test_a_debiased_average_forgets_the_identity_at_once():
    """The plain mean of what was learned until `1 / t` falls below `1 - ema`, then the moving average."""
    drawn = case("mlp")
    plain, debiased = (
        flat_geometry(drawn.model, F.cross_entropy, steps=2, lr=0.05, ema=0.5, debias=debias)
        for debias in (False, True)
    )
    for geometry in (plain, debiased):
        assert geometry.refresh(drawn.batch).accepted
    learned, halved = (geometry.metric.factors()[0]["diagonal"] for geometry in (debiased, plain))
    assert relative_error(halved - 1, 0.5 * (learned - 1)) < 1e-10


@pytest.mark.parametrize("kind", ["scalar", "diagonal"])
@pytest.mark.parametrize("steps", [1, 4])
def test_blocks_that_are_left_as_they_are_count_in_the_objective(kind, steps):
    drawn = case("mlp")
    structure = {next(iter(dict(drawn.model.named_parameters()))): "identity", "*": kind}
    geometry = flat_geometry(
        drawn.model, F.cross_entropy, structure=structure, solver="pcg", steps=steps, damping=0.1, ema=0.0
    )
    with geometry.linearizer.frozen():
        solution = geometry._solved(drawn.batch)
    with geometry.quadratic_model(drawn.batch) as model:
        g, Ug = model.gradient, geometry.metric.apply(model.gradient, solution.factors)
        HUg = model.product(Ug)
    J = sum((-g[n] * Ug[n] + 0.5 * Ug[n] * HUg[n] + 0.05 * Ug[n] ** 2).sum() for n in g)
    assert float(solution.after) == pytest.approx(float(J), rel=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"structure": {"0.*": "identity", "*": "diagonal"}, "lr": 0.05},
        {"structure": "scalar", "lr": 0.5, "steps": 20},  # factors below the floor
    ],
    ids=["identity", "floor"],
)
def test_normalised_beside_the_identity_and_at_the_floor(settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    batch = 3 * torch.randn(32, 5).double(), torch.randint(3, (32,))
    geometry = flat_geometry(model, F.cross_entropy, normalise=True, ema=0.0, **settings)
    geometry.refresh(batch)
    with geometry.quadratic_model(batch) as quadratic:
        g, Ug = quadratic.gradient, geometry.metric.apply(quadratic.gradient)
    along, square = (sum((part * other[name]).sum() for name, part in g.items()) for other in (Ug, g))
    assert float(along) == pytest.approx(float(square), rel=1e-6)

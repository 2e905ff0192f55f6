"""Exact line search and conjugate gradients reach the dense minimum, never rise, and refuse what is not quadratic."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from geometries import flat_geometry
from llqr import Inner, Metric
from llqr.metric import STRUCTURES
from llqr.refresh.inner_loop import working_copy
from llqr.solvers import Objective, SolverSettings
from llqr.solvers.line_search import ConjugateGradients, LineSearch
from quadratics import Quadratic, leaves_of, setting, shaken, slopes_of, solve
from references import dense_metric, relative_error, trainable, unflat
from small_models import case, mlp

LEARNED = [kind for kind in sorted(STRUCTURES) if kind != "identity"]
LINEAR = [kind for kind in LEARNED if len(STRUCTURES[kind].linear_in) == 1]
ALTERNATING = [kind for kind in LEARNED if len(STRUCTURES[kind].linear_in) == 2]
CURVED = [kind for kind in LEARNED if not STRUCTURES[kind].linear_in]
SOLVERS = ["line-search", "cg"]


def test_every_structure_is_one_of_the_three():
    assert (LINEAR, ALTERNATING) == (["dense", "diagonal", "scalar"], ["diag-kfac", "kfac"])
    assert CURVED == ["e-kfac", "e-kfac-channels", "e-kfac-one-sided", "e-kfac-psd", "kfac-psd"]


def even_setting(kind):
    """With a gradient whose entries are of one size. Otherwise `J` is as badly conditioned in the factors as their
    squares, and a line search without conjugate directions takes very long to many digits."""
    metric, quadratic = setting(kind)
    quadratic.g = quadratic.g.sign() * (1 + 0.5 * quadratic.g.sin())
    quadratic.gradient = unflat(quadratic.g, quadratic.like)
    return metric, quadratic


def lowest_over(metric, quadratic, factors, damping, moving):
    """The smallest `J` over the factors that `moving(group)` names, and the nearest factors that have it, densely."""
    names = [(i, name) for i, group in enumerate(metric.groups) for name in moving(group)]
    leaves = leaves_of(factors)
    start = torch.cat([leaves[i][name].detach().reshape(-1) for i, name in names])

    def value(vector):
        parts = vector.split([leaves[i][name].numel() for i, name in names])
        rebuilt = [dict(group) for group in leaves]
        for (i, name), part in zip(names, parts, strict=True):
            rebuilt[i][name] = part.reshape(leaves[i][name].shape)
        return quadratic.value(dense_metric(metric, quadratic.like, rebuilt), damping)

    hessian = torch.autograd.functional.hessian(value, start)
    (slope,) = torch.autograd.grad(value(at := start.clone().requires_grad_()), at)
    # Many factors may give the same `U g`: the pseudo-inverse takes those nearest to the start, as both solvers do.
    best = start - torch.linalg.pinv(hessian, rtol=1e-12, hermitian=True) @ slope
    return value(best).detach(), best, names


@pytest.mark.parametrize("kind", ["diagonal", "scalar"])
@pytest.mark.parametrize(
    ("solver", "steps", "made", "damping"),
    [("cg", 120, setting, 0.0), ("cg", 120, setting, 0.5), ("line-search", 350, even_setting, 0.5)],
)
def test_the_dense_minimum_is_reached(solver, steps, made, kind, damping):
    metric, quadratic = made(kind)
    factors = shaken(metric)
    solution = solve(metric, quadratic, Inner(solver, steps=steps), damping)
    lowest, best, names = lowest_over(metric, quadratic, factors, damping, lambda group: group.linear_in[0])
    found = torch.cat([solution.factors[i][name].reshape(-1) for i, name in names])
    assert float(solution.after) == pytest.approx(float(lowest), rel=1e-8)
    assert relative_error(found, best) < 1e-7


@pytest.mark.parametrize(("solver", "steps", "damping"), [("cg", 80, 0.0), ("cg", 80, 0.5), ("line-search", 350, 0.5)])
def test_a_dense_metric_reaches_the_newton_step(solver, steps, damping):
    """Block by block, a symmetric U takes g to any displacement."""
    metric, quadratic = setting("dense")
    shaken(metric)
    solution = solve(metric, quadratic, Inner(solver, steps=steps), damping)
    damped = quadratic.h + damping * torch.eye(len(quadratic.h), dtype=torch.float64)
    delta = -torch.linalg.solve(damped, quadratic.g)
    reached = -dense_metric(metric, quadratic.like, solution.factors) @ quadratic.g
    assert float(solution.after) == pytest.approx(float(0.5 * quadratic.g @ delta), rel=1e-8)
    assert relative_error(reached, delta) < 1e-6


@pytest.mark.parametrize("kind", ALTERNATING)
@pytest.mark.parametrize(("solver", "steps"), [(ConjugateGradients, 150), (LineSearch, 600)])
def test_a_long_turn_reaches_the_dense_minimum_of_its_set(solver, steps, kind, monkeypatch):
    monkeypatch.setattr(solver, "sweep", 10**6)
    metric, quadratic = even_setting(kind)
    start = shaken(metric)
    objective = Objective(metric, quadratic, 0.2)
    search = solver(metric, working_copy(metric), SolverSettings(momentum=0.5, clip=1e9))
    for _ in range(steps):
        search.advance(objective)
    lowest, best, names = lowest_over(metric, quadratic, start, 0.2, lambda group: group.linear_in[0])
    found = torch.cat([search.factors[i][name].reshape(-1) for i, name in names])
    assert float(search.step(objective)) == pytest.approx(float(lowest), rel=1e-8)
    assert relative_error(found, best) < 1e-6
    for group, own, before in zip(metric.groups, search.factors, start, strict=True):
        for name in own.keys() - set(group.linear_in[0]):
            assert own[name].equal(before[name])


@pytest.mark.parametrize("kind", ALTERNATING)
@pytest.mark.parametrize(("solver", "steps"), [("cg", 400), ("line-search", 800)])
def test_taking_turns_ends_where_no_factor_has_a_slope(solver, steps, kind):
    metric, quadratic = even_setting(kind)
    shaken(metric)
    solution = solve(metric, quadratic, Inner(solver, steps=steps), 0.2)
    _, start = slopes_of(metric, quadratic, metric.factors(), 0.2)
    _, end = slopes_of(metric, quadratic, solution.factors, 0.2)
    sizes = [sum(float(part.square().sum()) for group in slopes for part in group.values()) for slopes in (start, end)]
    assert sizes[1] < 1e-12 * sizes[0]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from([*LINEAR, *ALTERNATING]),
    solver=st.sampled_from([ConjugateGradients, LineSearch]),
    seed=st.integers(0, 2**16),
    shift=st.floats(-4, 4),
    momentum=st.floats(0, 0.99),
    clip=st.sampled_from([0.01, 1.0, 1e9]),
)
def test_no_step_raises_the_objective(kind, solver, seed, shift, momentum, clip):
    """Of any quadratic model, also one without a minimum; and what a step says of the objective is true."""
    model = mlp()
    metric = Metric(model, structure=kind)
    shaken(metric, seed)
    quadratic = Quadratic({name: p.detach() for name, p in trainable(model).items()}, seed=seed, definite=False)
    quadratic.h += shift * torch.eye(len(quadratic.h), dtype=torch.float64)
    objective = Objective(metric, quadratic, 0.0)
    search = solver(metric, working_copy(metric), SolverSettings(momentum=momentum, clip=clip))
    search.advance(objective)
    values = []
    for _ in range(10):
        true = float(objective.at(search.factors).value)
        values.append(float(search.step(objective)))
        assert values[-1] == pytest.approx(true, rel=1e-9, abs=1e-9)
    scale = max(map(abs, values))
    assert all(b <= a + 1e-12 * scale for a, b in itertools.pairwise(values))


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("kind", [*LINEAR, *ALTERNATING])
def test_where_every_direction_bends_down_the_factors_stay(solver, kind):
    metric, quadratic = setting(kind)
    quadratic.h = -quadratic.h
    start = shaken(metric)
    solution = solve(metric, quadratic, Inner(solver, steps=10))
    assert float(solution.after) == float(solution.before)
    for own, before in zip(solution.factors, start, strict=True):
        assert all(factor.equal(before[name]) for name, factor in own.items())


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("kind", [*LINEAR, *ALTERNATING])
def test_fifty_steps_of_the_heavy_ball_in_eight_products(solver, kind):
    drawn = case("mlp")
    objectives = {}
    for name, steps in (("heavy-ball", 50), (solver, 8)):
        geometry = flat_geometry(drawn.model, F.cross_entropy, structure=kind, solver=name, steps=steps, ema=0.0)
        objectives[name] = geometry.refresh(drawn.batch).objective_after
    assert objectives[solver] < objectives["heavy-ball"]


def test_newton_on_a_network():
    drawn = case("mlp")
    for solver in SOLVERS:
        geometry = flat_geometry(drawn.model, F.cross_entropy, divergence="newton", solver=solver, ema=0.0)
        refresh = geometry.refresh(drawn.batch)
        assert refresh.objective_after <= refresh.objective_before


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("kind", CURVED)
def test_what_is_not_quadratic_is_refused(solver, kind):
    metric, quadratic = setting(kind)
    with pytest.raises(ValueError, match=f"solver: '{solver}' needs an objective that is quadratic .* {kind} is not"):
        solve(metric, quadratic, Inner(solver))

"""The inner loop on quadratic models given as dense matrices: objective, gradient, and the three solvers."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import llqr
from llqr import Inner, Metric
from llqr.metric import STRUCTURES
from llqr.solve import Objective, solve
from references import dense_fisher, dense_gradient, dense_metric, flat, relative_error, trainable, unflat
from small_models import case, mlp

KINDS = sorted(STRUCTURES.keys() - {"identity"})  # those that learn
LINEAR = [kind for kind in KINDS if STRUCTURES[kind].linear]


class Quadratic:
    """`g` and `H` written out."""

    def __init__(self, parameters, seed=0, definite=True):
        generator = torch.Generator().manual_seed(seed)
        size = sum(p.numel() for p in parameters.values())
        root = torch.randn(size, size, generator=generator, dtype=torch.float64)
        self.g = torch.randn(size, generator=generator, dtype=torch.float64)
        # Far from diagonal, but well enough conditioned for the solvers to be checked to many digits.
        self.h = root @ root.T / size + torch.eye(size, dtype=torch.float64) if definite else (root + root.T) / 2
        self.like = parameters
        self.loss = torch.tensor(0.0, dtype=torch.float64)
        self.gradient = unflat(self.g, parameters)
        self.products = 0

    def product(self, v):
        self.products += 1
        return unflat(self.h @ flat(v), self.like)

    def value(self, u, damping=0.0):
        """`J` of a dense `U`."""
        delta = -u @ self.g
        return self.g @ delta + 0.5 * delta @ self.h @ delta + 0.5 * damping * delta @ delta


def setting(kind, definite=True):
    model = mlp()
    parameters = {name: p.detach() for name, p in trainable(model).items()}
    return Metric(model, structure=kind), Quadratic(parameters, definite=definite)


def shaken(metric, seed=0):
    generator = torch.Generator().manual_seed(seed)
    factors = [
        {n: f + 0.3 * torch.randn(f.shape, generator=generator, dtype=f.dtype) for n, f in group.items()}
        for group in metric.factors()
    ]
    metric.assign(factors)
    return factors


def leaves_of(factors):
    return [{name: f.detach().clone().requires_grad_() for name, f in group.items()} for group in factors]


def slopes_of(metric, quadratic, factors, damping=0.0):
    """`J` and its gradient by autograd through the dense quadratic form."""
    leaves = leaves_of(factors)
    value = quadratic.value(dense_metric(metric, quadratic.like, leaves), damping)
    flat_leaves = [f for group in leaves for f in group.values()]
    gradients = iter(torch.autograd.grad(value, flat_leaves, materialize_grads=True))
    return value.detach(), [{name: next(gradients) for name in group} for group in leaves]


# -- the objective -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damping", [0.0, 0.7])
@pytest.mark.parametrize("kind", [*KINDS, {"0.*": "identity", "2.bias": "scalar", "*": "e-kfac"}], ids=str)
def test_objective_and_gradient_equal_the_dense_quadratic(kind, damping):
    metric, quadratic = setting(kind, definite=False)
    factors = shaken(metric)
    objective = Objective(metric, quadratic, damping)
    value, residual = objective.value(factors)
    expected, slopes = slopes_of(metric, quadratic, factors, damping)
    assert float(value) == pytest.approx(float(expected), rel=1e-11)
    for own, wanted in zip(objective.slope(factors, residual), slopes, strict=True):
        for name, part in own.items():
            assert relative_error(part, wanted[name]) < 1e-10


@pytest.mark.parametrize("kind", LINEAR)
def test_the_hessian_in_linear_factors(kind):
    metric, quadratic = setting(kind)
    objective = Objective(metric, quadratic, 0.3)
    at, direction = shaken(metric, 1), shaken(metric, 2)
    moved = [{n: a[n] + d[n] for n in a} for a, d in zip(at, direction, strict=True)]
    _, here = slopes_of(metric, quadratic, at, 0.3)
    _, there = slopes_of(metric, quadratic, moved, 0.3)
    for bent, a, b in zip(objective.bend(direction), here, there, strict=True):
        for name, part in bent.items():
            assert relative_error(part, b[name] - a[name]) < 1e-9


def test_the_objective_on_a_network():
    """`J` through an engine equals `J` through the dense Fisher matrix."""
    drawn = case("mlp")
    geometry = llqr.Geometry(drawn.model, F.cross_entropy, structure="e-kfac", steps=3, damping=0.2, ema=0.0)
    refresh = geometry.refresh(drawn.batch)
    g, h = dense_gradient(drawn.model, drawn.loss_fn, drawn.batch), dense_fisher(drawn.model, drawn.batch[0])

    def value(u):
        delta = -u @ g
        return float(g @ delta + 0.5 * delta @ h @ delta + 0.1 * delta @ delta)

    like = trainable(drawn.model)
    assert refresh.objective_before == pytest.approx(value(torch.eye(len(g), dtype=g.dtype)), rel=1e-11)
    assert refresh.objective_after == pytest.approx(value(dense_metric(geometry.metric, like)), rel=1e-11)
    assert refresh.gradient_norm == pytest.approx(float(g.norm()), rel=1e-12)


# -- heavy ball --------------------------------------------------------------------------------------------------------


def clipped(metric, gradients, limit):
    """Factor by factor and block by block; for diagonal and scalar, layer by layer."""
    out = []
    for group, parts in zip(metric.groups, gradients, strict=True):
        if group.name == "scalar":
            out.append({"scalar": torch.stack([s * min(1.0, limit / max(abs(s), 1e-300)) for s in parts["scalar"]])})
        elif group.name == "diagonal":
            pieces = parts["diagonal"].split(group.sizes)
            norms = {}
            for block, piece in zip(group.blocks, pieces, strict=True):
                norms[block.layer] = norms.get(block.layer, 0.0) + float(piece.square().sum())
            scaled = [
                piece * min(1.0, limit / max(norms[block.layer] ** 0.5, 1e-300))
                for block, piece in zip(group.blocks, pieces, strict=True)
            ]
            out.append({"diagonal": torch.cat(scaled)})
        else:
            out.append(
                {n: torch.stack([f * min(1.0, limit / float(f.norm())) for f in part]) for n, part in parts.items()}
            )
    return out


@pytest.mark.parametrize("clip", [0.05, 1e9], ids=["clipped", "free"])
@pytest.mark.parametrize("kind", KINDS)
def test_heavy_ball_equals_a_loop_written_out(kind, clip):
    metric, quadratic = setting(kind)
    factors = shaken(metric)
    inner = Inner(steps=6, lr=2e-4, momentum=0.9, clip=clip, damping=0.1)
    solution = solve(metric, quadratic, inner)
    assert quadratic.products == inner.steps + 1
    expected = [{n: f.clone() for n, f in group.items()} for group in factors]
    momenta = [{n: torch.zeros_like(f) for n, f in group.items()} for group in factors]
    values = []
    for _ in range(inner.steps):
        value, slopes = slopes_of(metric, quadratic, expected, inner.damping)
        values.append(value)
        for group, momentum, slope in zip(expected, momenta, clipped(metric, slopes, clip), strict=True):
            for name in group:
                momentum[name] = 0.9 * momentum[name] + slope[name]
                group[name] = group[name] - inner.lr * momentum[name]
    last, _ = slopes_of(metric, quadratic, expected, inner.damping)
    assert float(solution.before) == pytest.approx(float(values[0]), rel=1e-11)
    assert float(solution.after) == pytest.approx(float(last), rel=1e-10)
    for own, wanted in zip(solution.factors, expected, strict=True):
        for name, factor in own.items():
            torch.testing.assert_close(factor, wanted[name], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("solver", ["heavy-ball", "adam", "cg"])
def test_the_metric_itself_is_not_touched(solver):
    metric, quadratic = setting("diagonal")
    factors = shaken(metric)
    before = [{n: f.clone() for n, f in group.items()} for group in factors]
    solution = solve(metric, quadratic, Inner(solver, steps=3))
    for group, old, new in zip(metric.factors(), before, solution.factors, strict=True):
        for name, factor in group.items():
            assert factor.equal(old[name])
            assert factor.grad is None
            assert new[name].grad is None
            assert not new[name].equal(old[name])


def test_non_finite_gradient_entries_count_as_zero():
    metric, quadratic = setting("diagonal")
    factors = shaken(metric)

    def broken(v):
        product = {name: torch.zeros_like(part) for name, part in v.items()}
        product["0.weight"][0, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
        return product

    quadratic.product = broken
    (own,) = solve(metric, quadratic, Inner(steps=1, lr=1.0, momentum=0.0, clip=1e9)).factors
    moved = own["diagonal"] - factors[0]["diagonal"]
    assert moved[:3].tolist() == [0.0, 0.0, 0.0]
    assert relative_error(moved[3:], quadratic.g[3:] ** 2) < 1e-12  # minus the gradient of -g.Ug


# -- adam --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_adam_lowers_the_objective(kind):
    metric, quadratic = setting(kind)
    solution = solve(metric, quadratic, Inner("adam", steps=40, lr=0.01))
    # J cannot fall below that of the Newton step; adam must make good part of the way there.
    lowest = float(-0.5 * quadratic.g @ torch.linalg.solve(quadratic.h, quadratic.g))
    assert lowest <= float(solution.after) < float(solution.before)
    assert float(solution.after) - lowest < 0.9 * (float(solution.before) - lowest)


# -- conjugate gradients -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damping", [0.0, 0.5])
@pytest.mark.parametrize("kind", LINEAR)
def test_conjugate_gradients_reach_the_dense_minimum(kind, damping):
    metric, quadratic = setting(kind)
    shaken(metric)
    solution = solve(metric, quadratic, Inner("cg", steps=150, damping=damping))
    # J is quadratic in the factors: its Hessian and slope, by autograd, give the minimum in one dense solve.
    leaves = leaves_of(metric.factors())
    names = [(i, name) for i, group in enumerate(leaves) for name in group]
    start = torch.cat([leaves[i][name].detach().reshape(-1) for i, name in names])

    def value(vector):
        parts = vector.split([leaves[i][name].numel() for i, name in names])
        rebuilt = [dict(group) for group in leaves]
        for (i, name), part in zip(names, parts, strict=True):
            rebuilt[i][name] = part.reshape(leaves[i][name].shape)
        return quadratic.value(dense_metric(metric, quadratic.like, rebuilt), damping)

    if kind == "dense":
        # Block by block, a symmetric U takes g to any displacement: the minimum is the whole damped Newton step.
        damped = quadratic.h + damping * torch.eye(len(quadratic.h), dtype=torch.float64)
        delta = -torch.linalg.solve(damped, quadratic.g)
        lowest = quadratic.g @ delta + 0.5 * delta @ damped @ delta
    else:
        hessian = torch.autograd.functional.hessian(value, start)
        (slope,) = torch.autograd.grad(value(at := start.clone().requires_grad_()), at)
        best = start - torch.linalg.solve(hessian, slope)
        found = torch.cat([solution.factors[i][name].reshape(-1) for i, name in names])
        assert relative_error(found, best) < 1e-8
        lowest = value(best)
        delta = None
    assert float(solution.after) == pytest.approx(float(lowest), rel=1e-8)
    if delta is not None:
        reached = -dense_metric(metric, quadratic.like, solution.factors) @ quadratic.g
        assert relative_error(reached, delta) < 1e-8


def test_conjugate_gradients_spend_no_more_products_than_steps():
    metric, quadratic = setting("diagonal")
    solve(metric, quadratic, Inner("cg", steps=4))
    assert quadratic.products == 5


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in LINEAR])
def test_conjugate_gradients_refuse_what_is_not_quadratic(kind):
    metric, quadratic = setting(kind)
    with pytest.raises(ValueError, match=f"solver: 'cg' needs an objective quadratic .*, which {kind} is not"):
        solve(metric, quadratic, Inner("cg"))


@pytest.mark.parametrize("kind", LINEAR)
def test_conjugate_gradients_stop_at_negative_curvature(kind):
    metric, quadratic = setting(kind, definite=False)
    quadratic.h -= 3 * torch.eye(len(quadratic.h), dtype=torch.float64)
    solution = solve(metric, quadratic, Inner("cg", steps=60))
    assert quadratic.products < 60
    assert torch.isfinite(solution.after)
    assert float(solution.after) <= float(solution.before)
    assert all(torch.isfinite(f).all() for group in solution.factors for f in group.values())


def test_conjugate_gradients_with_newton_on_a_network():
    drawn = case("mlp")
    geometry = llqr.Geometry(drawn.model, F.cross_entropy, divergence="newton", solver="cg", ema=0.0)
    refresh = geometry.refresh(drawn.batch)
    assert refresh.objective_after <= refresh.objective_before


def test_a_gradient_of_zero_is_a_minimum():
    metric, quadratic = setting("diagonal")
    quadratic.gradient = {name: torch.zeros_like(part) for name, part in quadratic.gradient.items()}
    for solver in ("heavy-ball", "adam", "cg"):
        solution = solve(metric, quadratic, Inner(solver, steps=3))
        assert float(solution.before) == float(solution.after) == 0.0
        assert all(f.equal(torch.ones_like(f)) for group in solution.factors for f in group.values())


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["heavy-ball", "adam", "cg"])
def test_the_identity_has_nothing_to_learn(solver):
    metric, quadratic = setting("identity")
    solution = solve(metric, quadratic, Inner(solver, steps=3))
    assert not any(solution.factors)
    expected = quadratic.value(torch.eye(len(quadratic.g), dtype=torch.float64))
    assert float(solution.before) == float(solution.after) == pytest.approx(float(expected), rel=1e-12)
    drawn = case("mlp")
    geometry = llqr.Geometry(drawn.model, F.cross_entropy, structure="identity", solver=solver)
    assert geometry.refresh(drawn.batch).accepted
    grads = {name: torch.randn_like(p) for name, p in geometry.parameters.items()}
    assert all(part is grads[name] for name, part in geometry.metric.apply(grads).items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"solver": "newton"}, "solver: unknown 'newton'; choose one of heavy-ball, adam, cg"),
        ({"steps": 0}, "steps: expected a number >= 1, got 0"),
        ({"lr": -1e-3}, "lr: expected a number >= 0"),
        ({"momentum": -0.1}, "momentum: expected a number >= 0"),
        ({"clip": float("nan")}, "clip: expected a number >= 0, got nan"),
        ({"damping": -1}, "damping: expected a number >= 0"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        Inner(**settings)


def test_the_defaults_are_the_papers():
    assert Inner() == Inner("heavy-ball", steps=50, lr=1e-3, momentum=0.9, clip=5.0, damping=0.0)


def test_factors_of_bfloat16_parameters_are_learned_in_float32():
    model = nn.Linear(3, 2).bfloat16()
    parameters = dict(model.named_parameters())
    metric = Metric(model, structure="e-kfac")
    quadratic = Quadratic({name: p.detach().double() for name, p in parameters.items()})
    quadratic.gradient = {name: part.bfloat16() for name, part in quadratic.gradient.items()}
    quadratic.product = lambda v: v
    solution = solve(metric, quadratic, Inner(steps=2))
    assert {f.dtype for group in solution.factors for f in group.values()} == {torch.float32}

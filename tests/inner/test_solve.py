"""The inner loop on quadratic models given as dense matrices: objective, gradient, heavy ball and adam."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from geometries import flat_geometry
from launches import Launches
from llqr import Inner, Metric
from llqr.cuda import Branches
from llqr.inner import SOLVERS, Objective
from llqr.metric import STRUCTURES
from quadratics import Quadratic, setting, shaken, slopes_of, solve
from references import dense_fisher, dense_gradient, dense_metric, relative_error, trainable
from small_models import case

KINDS = sorted(STRUCTURES.keys() - {"identity"})  # those that learn
EVERY_SOLVER = pytest.mark.parametrize("solver", SOLVERS)


# -- the objective -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damping", [0.0, 0.7])
@pytest.mark.parametrize("kind", [*KINDS, {"0.*": "identity", "2.bias": "scalar", "*": "e-kfac"}], ids=str)
def test_objective_and_gradient_equal_the_dense_quadratic(kind, damping):
    metric, quadratic = setting(kind, definite=False)
    factors = shaken(metric)
    objective = Objective(metric, quadratic, damping)
    here = objective.at(factors)
    expected, slopes = slopes_of(metric, quadratic, factors, damping)
    assert float(here.value) == pytest.approx(float(expected), rel=1e-11)
    for found in (here.slopes(), objective.known(factors, here.residual).slopes()):
        for own, wanted in zip(found, slopes, strict=True):
            assert own.keys() == wanted.keys()
            for name, part in own.items():
                assert relative_error(part, wanted[name]) < 1e-10


def test_the_objective_on_a_network():
    """`J` through an engine equals `J` through the dense Fisher matrix."""
    drawn = case("mlp")
    geometry = flat_geometry(drawn.model, F.cross_entropy, structure="e-kfac", steps=3, damping=0.2, ema=0.0)
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
            pieces = parts["diagonal"].split([block.size for block in group.blocks])
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
    inner = Inner(steps=6, lr=2e-4, momentum=0.9, clip=clip)
    solution = solve(metric, quadratic, inner, damping=0.1)
    expected = [{n: f.clone() for n, f in group.items()} for group in factors]
    momenta = [{n: torch.zeros_like(f) for n, f in group.items()} for group in factors]
    values = []
    for _ in range(inner.steps):
        value, slopes = slopes_of(metric, quadratic, expected, 0.1)
        values.append(value)
        for group, momentum, slope in zip(expected, momenta, clipped(metric, slopes, clip), strict=True):
            for name in group:
                momentum[name] = 0.9 * momentum[name] + slope[name]
                group[name] = group[name] - inner.lr * momentum[name]
    last, _ = slopes_of(metric, quadratic, expected, 0.1)
    assert float(solution.before) == pytest.approx(float(values[0]), rel=1e-11)
    assert float(solution.after) == pytest.approx(float(last), rel=1e-10)
    for own, wanted in zip(solution.factors, expected, strict=True):
        for name, factor in own.items():
            torch.testing.assert_close(factor, wanted[name], rtol=1e-11, atol=1e-12)


@EVERY_SOLVER
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


# -- every solver ------------------------------------------------------------------------------------------------------


@EVERY_SOLVER
@pytest.mark.parametrize("steps", [1, 4])
def test_steps_is_the_number_of_products_before_the_objective_is_read_again(solver, steps):
    metric, quadratic = setting("diagonal")
    solve(metric, quadratic, Inner(solver, steps=steps))
    assert quadratic.products == (steps if solver == "pcg" else steps + 1)


@EVERY_SOLVER
def test_a_gradient_of_zero_is_a_minimum(solver):
    metric, quadratic = setting("diagonal" if solver == "pcg" else "kfac")
    quadratic.gradient = {name: torch.zeros_like(part) for name, part in quadratic.gradient.items()}
    solution = solve(metric, quadratic, Inner(solver, steps=6))
    assert float(solution.before) == float(solution.after) == 0.0
    for group, start in zip(solution.factors, metric.factors(), strict=True):
        assert all(factor.equal(start[name]) for name, factor in group.items())


# Not adam: torch's counts its steps on the CPU.
@pytest.mark.parametrize(
    ("solver", "kind"),
    [
        ("heavy-ball", "diagonal"),
        ("heavy-ball", "scalar"),
        ("heavy-ball", "kfac"),
        ("pcg", "diagonal"),
        ("pcg", "scalar"),
    ],
)
def test_nothing_is_read_from_the_device_before_the_end(solver, kind):
    """A host that waits for a number between two products leaves the device idle."""
    metric, quadratic = setting(kind)
    with Launches() as operators:
        solve(metric, quadratic, Inner(solver, steps=6))
    assert operators.total > 0
    assert not {"_local_scalar_dense", "item", "is_nonzero", "equal"} & operators.by_name.keys()


# -- settings ----------------------------------------------------------------------------------------------------------


@EVERY_SOLVER
def test_the_identity_has_nothing_to_learn(solver):
    metric, quadratic = setting("identity")
    solution = solve(metric, quadratic, Inner(solver, steps=3))
    assert not any(solution.factors)
    expected = quadratic.value(torch.eye(len(quadratic.g), dtype=torch.float64))
    assert float(solution.before) == float(solution.after) == pytest.approx(float(expected), rel=1e-12)
    drawn = case("mlp")
    geometry = flat_geometry(drawn.model, F.cross_entropy, structure="identity", solver=solver)
    assert geometry.refresh(drawn.batch).accepted
    grads = {name: torch.randn_like(p) for name, p in geometry.parameters.items()}
    assert all(part is grads[name] for name, part in geometry.metric.apply(grads).items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"solver": "newton"}, "solver: unknown 'newton'; choose one of heavy-ball, adam, pcg"),
        ({"steps": 0}, "steps: expected a number >= 1, got 0"),
        ({"lr": -1e-3}, r"lr: expected a number in \[0, inf\)"),
        ({"momentum": -0.1}, "momentum: expected a number >= 0"),
        ({"clip": float("nan")}, "clip: expected a number >= 0, got nan"),
        ({"normalise": "no"}, "normalise: expected True or False, got 'no'"),
        ({"debias": 0.5}, "debias: expected True or False, got 0.5"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        Inner(**settings)


def test_the_defaults_are_the_papers():
    assert Inner() == Inner("heavy-ball", steps=50, lr=1e-3, momentum=0.9, clip=5.0, product_every=1)


def test_factors_of_bfloat16_parameters_are_learned_in_float32():
    model = nn.Linear(3, 2).bfloat16()
    parameters = dict(model.named_parameters())
    metric = Metric(model, structure="e-kfac")
    quadratic = Quadratic({name: p.detach().double() for name, p in parameters.items()})
    quadratic.gradient = {name: part.bfloat16() for name, part in quadratic.gradient.items()}
    quadratic.product = lambda v: v
    solution = solve(metric, quadratic, Inner(steps=2))
    assert {f.dtype for group in solution.factors for f in group.values()} == {torch.float32}


# -- side by side ------------------------------------------------------------------------------------------------------


class InTurn(Branches):
    """What a CUDA graph's branches do, one after the other; it tells how many were under way at once."""

    def __init__(self):
        self.running, self.beside = 0, []

    def one(self):
        self.running += 1
        return nullcontext()

    def join(self):
        self.beside.append(self.running)
        self.running = 0


@pytest.mark.parametrize("large", [0, 30, 2**25])
def test_groups_side_by_side_are_those_one_after_the_other(large, monkeypatch):
    monkeypatch.setattr("llqr.inner.objective.LARGE", large)
    metric, quadratic = setting("e-kfac")
    factors, branches = shaken(metric), InTurn()
    plain, branched = (Objective(metric, quadratic, branches=own) for own in (None, branches))
    expected, found = plain.at(factors), branched.at(factors)
    assert torch.equal(found.value, expected.value)
    for own, reference in zip(found.slopes(), expected.slopes(), strict=True):
        assert own.keys() == reference.keys()
        assert all(torch.equal(own[name], reference[name]) for name in own)
    small = sum(group.stored() < large for group in metric.groups)
    assert [count for count in branches.beside if count] == [small] * 2 * bool(small)


def test_the_smallest_begin_first_and_large_ones_run_alone():
    begun = []
    branches = InTurn()

    def computed(size):
        begun.append((size, branches.running))
        return -size

    sizes = [5, 100, 1, 70, 3]
    found = branches.run([partial(computed, size) for size in sizes], sizes, alone=70)
    assert found == [-size for size in sizes]
    assert begun == [(1, 1), (3, 2), (5, 3), (70, 0), (100, 0)]

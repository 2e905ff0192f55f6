"""The objective averaged over the gradients of shares of the batch, against the dense quadratic."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from geometries import flat_geometry
from llqr import Inner
from llqr.curvature import ENGINES, NEWTON, NGD, Problem, QuadraticModel
from llqr.metric import STRUCTURES
from llqr.solvers import Objective
from llqr.solvers.damping import Damping
from quadratics import leaves_of, setting, shaken, solve
from references import ONE_PROCESS, TOLERANCE, dense_gradient, dense_metric, flat, relative_error, trainable, unflat
from small_models import case

KINDS = sorted(STRUCTURES.keys() - {"identity"})
ENTRYWISE = [kind for kind in KINDS if STRUCTURES[kind].scales_entries]
K = 3


def several(quadratic, count=K):
    """The same `H` with several random gradients."""
    generator = torch.Generator().manual_seed(7)
    drawn = torch.randn(count, len(quadratic.g), generator=generator, dtype=torch.float64)
    gradients = tuple(unflat(g, quadratic.like) for g in drawn)
    mean = unflat(drawn.mean(0), quadratic.like)
    return drawn, QuadraticModel(quadratic.loss, mean, quadratic.product, gradients)


def value(u, h, drawn, damping=0.0):
    """`mean_k -g_k.U g_k + 1/2 U g_k.(H + damping) U g_k`, written out."""
    damped = h + damping * torch.eye(len(h), dtype=h.dtype)
    return torch.stack([-g @ (u @ g) + 0.5 * (u @ g) @ damped @ (u @ g) for g in drawn]).mean()


@pytest.mark.parametrize("damping", [0.0, 0.7])
@pytest.mark.parametrize("kind", [*KINDS, {"0.*": "identity", "2.bias": "scalar", "*": "e-kfac"}], ids=str)
def test_objective_and_slopes_equal_the_dense_mean(kind, damping):
    metric, quadratic = setting(kind, definite=False)
    factors = shaken(metric)
    drawn, model = several(quadratic)
    here = Objective(metric, model, damping).at(factors)
    leaves = leaves_of(factors)
    expected = value(dense_metric(metric, quadratic.like, leaves), quadratic.h, drawn, damping)
    flat_leaves = [factor for group in leaves for factor in group.values()]
    slopes = iter(torch.autograd.grad(expected, flat_leaves, materialize_grads=True))
    assert float(here.value) == pytest.approx(expected.item(), rel=1e-11)
    for own, group in zip(here.slopes(), leaves, strict=True):
        for name in group:
            assert relative_error(own[name], next(slopes)) < 1e-10


@pytest.mark.parametrize("solver", ["heavy-ball", "adam", "line-search", "cg", "pcg"])
def test_every_solver_lowers_it_with_a_product_per_gradient(solver):
    metric, quadratic = setting("diagonal")
    drawn, model = several(quadratic)
    inner = Inner(solver, steps=6, lr=0.01, gradients=K)
    solution = solve(metric, model, inner)
    assert quadratic.products == inner.products == (6 if solver == "pcg" else 7) * K
    start, end = (
        value(dense_metric(metric, quadratic.like, factors), quadratic.h, drawn)
        for factors in (metric.factors(), solution.factors)
    )
    assert float(solution.before) == pytest.approx(float(start), rel=1e-11)
    assert float(solution.after) == pytest.approx(float(end), rel=1e-11)
    assert end < start


def test_equal_gradients_are_one_gradient():
    metric, quadratic = setting("e-kfac")
    same = QuadraticModel(quadratic.loss, quadratic.gradient, quadratic.product, (quadratic.gradient,) * 2)
    one, two = (solve(metric, model, Inner(steps=5)) for model in (quadratic, same))
    for own, expected in zip(two.factors, one.factors, strict=True):
        assert all(relative_error(factor, expected[name]) < 1e-12 for name, factor in own.items())


# -- the exact minimiser -----------------------------------------------------------------------------------------------


def minimiser(metric, quadratic, drawn, damping):
    """The lowest `J` and its factors: `A u = b`, from the Hessian and the gradient of the dense `J` at zero."""
    (shape,) = {factor.shape for group in metric.factors() for factor in group.values()}

    def dense(u):
        return value(dense_metric(metric, quadratic.like, [{metric.groups[0].name: u}]), quadratic.h, drawn, damping)

    zero = torch.zeros(shape, dtype=torch.float64)
    a = torch.autograd.functional.hessian(dense, zero)
    b = -torch.autograd.functional.jacobian(dense, zero)
    best = torch.linalg.solve(a, b)
    return dense(best), best


@pytest.mark.parametrize("damping", [0.0, 0.5])
@pytest.mark.parametrize("kind", ENTRYWISE)
def test_pcg_reaches_the_dense_minimiser(kind, damping):
    metric, quadratic = setting(kind)
    shaken(metric)
    drawn, model = several(quadratic)
    solution = solve(metric, model, Inner("pcg", steps=120, gradients=K), damping)
    lowest, best = minimiser(metric, quadratic, drawn, damping)
    (found,) = (factor for group in solution.factors for factor in group.values())
    assert float(solution.after) == pytest.approx(float(lowest), rel=1e-10)
    assert relative_error(found, best) < 1e-7


@pytest.mark.parametrize("kind", ENTRYWISE)
def test_the_first_step_is_the_best_multiple(kind):
    metric, quadratic = setting(kind)
    start = shaken(metric)
    drawn, model = several(quadratic)
    solution = solve(metric, model, Inner("pcg", steps=1, gradients=K))
    u = dense_metric(metric, quadratic.like, start)
    linear = torch.stack([g @ (u @ g) for g in drawn]).mean()
    curved = torch.stack([(u @ g) @ quadratic.h @ (u @ g) for g in drawn]).mean()
    for own, before in zip(solution.factors, start, strict=True):
        assert all(relative_error(factor, before[name] * linear / curved) < 1e-11 for name, factor in own.items())


def test_pcg_never_raises_the_objective_of_an_indefinite_model():
    metric, quadratic = setting("diagonal", definite=False)
    shaken(metric)
    _, model = several(quadratic)
    values = [float(solve(metric, model, Inner("pcg", steps=steps, gradients=K)).after) for steps in range(1, 8)]
    assert all(later <= earlier + 1e-9 * abs(earlier) for earlier, later in pairwise(values))


@pytest.mark.parametrize("kind", ["kfac", "e-kfac", "dense"])
def test_pcg_refuses_what_does_not_scale_entries(kind):
    metric, quadratic = setting(kind)
    with pytest.raises(ValueError, match=f"solver: 'pcg' is for structures that scale entries .* {kind} does not"):
        solve(metric, quadratic, Inner("pcg"))


# -- on a network ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("divergence", [NGD, NEWTON], ids=lambda divergence: divergence.name)
@pytest.mark.parametrize("engine", ONE_PROCESS)
@pytest.mark.parametrize("network", ["mlp", "batch-norm-cnn"])
def test_every_engine_gives_the_gradients_of_the_shares(network, engine, divergence):
    drawn = case(network)
    drawn.model.eval()
    x, y = drawn.batch
    rows = len(y)
    problem = Problem(drawn.model, drawn.loss_fn, drawn.batch, trainable(drawn.model))
    with torch.no_grad():
        model = ENGINES[engine](divergence, gradients=K).linearise(problem)
    cuts = [rows * k // K for k in range(K + 1)]
    for k, gradient in enumerate(model.gradients):
        own = slice(cuts[k], cuts[k + 1])
        expected = dense_gradient(drawn.model, drawn.loss_fn, (x[own], y[own])) * (K * len(y[own]) / rows)
        assert relative_error(flat(gradient), expected) < 1e-10
    assert relative_error(flat(model.gradient), dense_gradient(drawn.model, drawn.loss_fn, drawn.batch)) < 1e-10
    v = {name: torch.randn_like(p) for name, p in trainable(drawn.model).items()}
    with torch.no_grad():
        one = ENGINES["double-backward"](divergence).linearise(problem)
        expected = [one.product(v), *map(one.product, model.gradients)]
        found = model.multiplied([v, *model.gradients])
    for Hv, reference in zip([model.product(v), *found], [expected[0], *expected], strict=True):
        assert relative_error(flat(Hv), flat(reference)) < TOLERANCE[engine]


@pytest.mark.parametrize("engine", ["forward", "double-backward", "linearised"])
def test_products_of_several_gradients_share_their_passes(engine, capfd):
    """One call of the network (or none) instead of one for each, and no warning of torch's about slow batching."""
    drawn = case("vit")
    calls = []
    drawn.model.eval().register_forward_hook(lambda *_: calls.append(1))
    problem = Problem(drawn.model, drawn.loss_fn, drawn.batch, trainable(drawn.model))
    with torch.no_grad():
        quadratic = ENGINES[engine](NGD, gradients=K).linearise(problem)
        del calls[:]
        quadratic.multiplied(quadratic.gradients)
    assert len(calls) == (engine == "forward")
    assert "batching rule" not in capfd.readouterr().err


def test_networks_that_cannot_be_batched_multiply_one_by_one():
    class Draws(torch.nn.Module):
        """Draws random numbers, which `torch.vmap` refuses; they do not matter here."""

        def forward(self, x):
            return x + 0 * torch.rand_like(x)

    model = torch.nn.Sequential(torch.nn.Linear(4, 3), Draws()).double()
    batch = torch.randn(6, 4, dtype=torch.float64), torch.randint(3, (6,))
    problem = Problem(model, F.cross_entropy, batch, trainable(model))
    with torch.no_grad():
        quadratic = ENGINES["forward"](NGD, gradients=K).linearise(problem)
        with pytest.raises(RuntimeError, match="vmap"):
            torch.vmap(quadratic.product)(
                {n: torch.stack([g[n] for g in quadratic.gradients]) for n in problem.parameters}
            )
        for g, Hg in zip(quadratic.gradients, quadratic.multiplied(quadratic.gradients), strict=True):
            assert relative_error(flat(Hg), flat(quadratic.product(g))) < 1e-12


def test_micro_batches_give_the_same_shares():
    drawn = case("mlp")
    factors = []
    for micro_batch in (None, 2):
        geometry = flat_geometry(
            drawn.model, F.cross_entropy, solver="pcg", steps=3, gradients=2, ema=0.0, micro_batch=micro_batch
        )
        assert geometry.refresh(drawn.batch).accepted
        factors.append(geometry.metric.named_factors())
    assert all(relative_error(factor, factors[0][name]) < 1e-10 for name, factor in factors[1].items())


def test_a_metric_without_factors_takes_several_gradients():
    drawn = case("mlp")
    assert flat_geometry(drawn.model, F.cross_entropy, structure="identity", gradients=2).refresh(drawn.batch).accepted


def test_more_gradients_than_samples_are_refused():
    drawn = case("mlp")
    geometry = flat_geometry(drawn.model, F.cross_entropy, gradients=100)
    with pytest.raises(ValueError, match="gradients: 100 of them need an inner batch of as many samples"):
        geometry.refresh(drawn.batch)


# -- damping -----------------------------------------------------------------------------------------------------------


def test_a_share_of_the_curvature():
    metric, quadratic = setting("diagonal")
    g, h = quadratic.g, quadratic.h
    absolute = 0.25 * (g @ h @ g) / (g @ g)
    relative, fixed = (
        Objective(metric, quadratic, damping).at(metric.factors()).value
        for damping in (Damping.of("25%"), float(absolute))
    )
    assert float(relative) == pytest.approx(float(fixed), rel=1e-12)


@pytest.mark.parametrize("damping", [-1, "much", "-10%", True, None, float("nan"), float("inf")])
def test_other_dampings_are_refused(damping):
    with pytest.raises(ValueError, match="damping: expected a number >= 0, or a share of the curvature such as '10%'"):
        Damping.of(damping)


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
    geometry = flat_geometry(
        drawn.model, F.cross_entropy, structure=kind, steps=4, lr=0.05, gradients=2, normalise=True, ema=ema
    )
    for _ in range(2):
        assert geometry.refresh(drawn.batch).accepted
    with geometry.quadratic_model(drawn.batch) as model:
        squares = [sum((part * part).sum() for part in g.values()) for g in model.gradients]
        along = [
            sum((part * geometry.metric.apply(g)[name]).sum() for name, part in g.items()) for g in model.gradients
        ]
    assert float(sum(along)) == pytest.approx(float(sum(squares)), rel=1e-10)


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

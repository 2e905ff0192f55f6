"""`H v` from products made before: exact where they reach, and the inner loop that lives on it."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from geometries import flat_geometry
from llqr import Inner
from llqr.inner import Objective
from llqr.inner.objective import DIRECTIONS, Extrapolation
from quadratics import setting, shaken, solve
from references import relative_error
from small_models import case

SHAPES = [(3, 4), (7,)]


class Linear:
    """A symmetric `H` on vectors in two parts."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)
        root = torch.randn(19, 19, generator=self.generator, dtype=torch.float64)
        self.h = root + root.T

    def draw(self):
        return torch.randn(19, generator=self.generator, dtype=torch.float64)

    def times(self, v):
        return self.h @ v


def cut(v):
    return [v[:12].view(3, 4), v[12:]]


def whole(parts):
    return torch.cat([part.flatten() for part in parts])


def taught(linear, vectors):
    known = Extrapolation()
    for v in vectors:
        known.remember(cut(v), cut(linear.times(v)))
    return known


def by_least_squares(linear, vectors, v):
    """The last product, and the differences between the last few ones, the first of them to `H 0 = 0`."""
    points = [torch.zeros_like(v), *vectors]
    steps = torch.stack([b - a for a, b in pairwise(points)][-DIRECTIONS:], 1)
    shares = torch.linalg.lstsq(steps, (v - vectors[-1]).unsqueeze(1)).solution
    return linear.times(vectors[-1]) + linear.times((steps @ shares).squeeze(1))


@given(st.integers(0, 10**6), st.integers(1, 6))
def test_it_is_the_least_squares_fit_through_what_is_known(seed, count):
    linear = Linear(seed)
    vectors = [linear.draw() for _ in range(count)]
    known, v = taught(linear, vectors), linear.draw()
    expected = by_least_squares(linear, vectors, v)
    assert relative_error(whole(known.product(cut(v))), expected) < 1e-10


@given(st.integers(0, 10**6), st.floats(-3, 3), st.floats(-3, 3))
def test_it_is_exact_where_products_are_known(seed, ahead, aside):
    linear = Linear(seed)
    a, b, c = (linear.draw() for _ in range(3))
    known = taught(linear, [a, b, c])
    v = c + ahead * (c - b) + aside * (b - a)
    assert relative_error(whole(known.product(cut(v))), linear.times(v)) < 1e-10


def test_one_product_serves_all_its_multiples():
    linear = Linear(0)
    v = linear.draw()
    assert relative_error(whole(taught(linear, [v]).product(cut(-2.5 * v))), linear.times(-2.5 * v)) < 1e-12


def test_what_was_forgotten_is_not_used():
    linear, other = Linear(0), Linear(1)
    known, v, w = taught(linear, [linear.draw() for _ in range(3)]), other.draw(), other.draw()
    known.forget()
    assert whole(known.product(cut(v))).count_nonzero() == 0
    for vector in (v, w):
        known.remember(cut(vector), cut(other.times(vector)))
    assert torch.equal(whole(known.product(cut(v))), whole(taught(other, [v, w]).product(cut(v))))


def test_a_direction_that_is_hardly_new_is_left_out():
    """Its rounding errors would be blown up: here by a million."""
    linear = Linear(0)
    v, noise = linear.draw(), linear.draw()
    known = Extrapolation()
    for vector, error in ((v, 0), (2 * v, 1e-6 * noise), (3 * v, -1e-6 * noise)):
        known.remember(cut(vector + 1e-9 * noise), cut(linear.times(vector) + error))
    beside = linear.draw()
    beside -= v * (beside @ v) / (v @ v)
    found = whole(known.product(cut(3 * v + beside)))
    assert relative_error(found, linear.times(3 * v)) < 1e-5


def test_what_is_remembered_is_a_copy():
    linear = Linear(0)
    v = linear.draw()
    parts, Hv = cut(v.clone()), cut(linear.times(v))
    known = Extrapolation()
    known.remember(parts, Hv)
    for part in (*parts, *Hv):
        part.zero_()
    known.product(cut(v))[0].zero_()
    assert relative_error(whole(known.product(cut(v))), linear.times(v)) < 1e-12


@pytest.mark.parametrize("size", [0.1, 1e-3])
def test_float32_is_enough_for_steps_that_are_small_beside_what_moves(size):
    """The error is relative to the last step, of `size` beside `v`, and not to `v`."""
    generator = torch.Generator().manual_seed(0)
    h, v, ahead, aside = (torch.randn(10**5, generator=generator, dtype=torch.float64) for _ in range(4))

    def path(t):
        return v + size * (t * ahead + 0.1 * t * t * aside)

    known = Extrapolation()
    for t in range(3):
        known.remember([path(t).float()], [(h * path(t)).float()])
    (found,) = known.product([path(3).float()])
    assert (found.double() - h * path(3)).norm() / (h * (path(3) - path(2))).norm() < 1e-3


# -- in the inner loop -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "every", "products"), [(50, 1, 51), (50, 5, 12), (50, 3, 19), (6, 100, 3), (1, 5, 2)]
)
def test_how_many_products_are_made(steps, every, products):
    metric, quadratic = setting("diagonal")
    solve(metric, quadratic, Inner(steps=steps, product_every=every))
    assert quadratic.products == products


@pytest.mark.parametrize("solver", ["heavy-ball", "adam"])
def test_it_is_exact_where_few_directions_matter(solver):
    """One number a layer: every `U g` is a combination of as many vectors as there are layers, two here."""
    metric, quadratic = setting("scalar")
    assert sum(len(group.layers) for group in metric.groups) == 2
    few, all_of_them = (
        solve(metric, quadratic, Inner(solver, steps=30, lr=0.01, product_every=every), 0.2) for every in (6, 1)
    )
    for found, expected in zip(few.factors, all_of_them.factors, strict=True):
        for name, factor in found.items():
            assert relative_error(factor, expected[name]) < 1e-9
    assert float(few.after) == pytest.approx(float(all_of_them.after), rel=1e-9)


@pytest.mark.parametrize("structure", ["diagonal", "kfac", "e-kfac"])
def test_the_objectives_of_a_report_are_exact(structure):
    metric, quadratic = setting(structure)
    shaken(metric)
    solution = solve(metric, quadratic, Inner(steps=20, product_every=5))
    assert float(solution.before) == pytest.approx(float(value_at(metric, quadratic, metric.factors())), rel=1e-10)
    assert float(solution.after) == pytest.approx(float(value_at(metric, quadratic, solution.factors)), rel=1e-10)


def value_at(metric, quadratic, factors):
    return Objective(metric, quadratic, 0.0).at(factors).value


@pytest.mark.parametrize("structure", ["diagonal", "kfac", "e-kfac", "e-kfac-psd", "diag-kfac"])
@pytest.mark.parametrize("network", ["batch-norm-cnn", "vit"])
def test_on_a_network_it_learns_nearly_the_same(network, structure):
    """Five times the paper's learning rate, so that `U` is further from the identity than there."""
    drawn = case(network)
    moved = []
    for every in (1, 5):
        geometry = flat_geometry(
            drawn.model,
            drawn.loss_fn,
            structure=structure,
            engine="double-backward",
            ema=0.0,
            lr=0.005,
            product_every=every,
        )
        assert geometry.refresh(drawn.batch).accepted
        weights = {name: p.detach().clone() for name, p in geometry.parameters.items()}
        applied = geometry.metric.apply(weights)
        moved.append(torch.cat([(applied[name] - part).flatten() for name, part in weights.items()]))
    assert 0 < relative_error(moved[1], moved[0]) < 0.005


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"product_every": 0}, ValueError, "product_every: expected a number >= 1, got 0"),
        ({"product_every": 2.5}, TypeError, "product_every: expected a whole number, got 2.5"),
        ({"product_every": "5"}, TypeError, "product_every: expected a whole number, got '5'"),
        ({"steps": 10.5}, TypeError, "steps: expected a whole number, got 10.5"),
        ({"momentum": "0.9"}, TypeError, "momentum: expected a number, got '0.9'"),
        ({"solver": "pcg", "product_every": 5}, ValueError, "product_every: not with solver='pcg'"),
    ],
)
def test_what_cannot_be_is_refused(settings, error, message):
    with pytest.raises(error, match=message):
        Inner(**settings)

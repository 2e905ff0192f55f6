"""A refresh spread over training steps: the burst's result, an even share of it a step, and a bit-exact resume."""

import copy
import functools
import io
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import llqr
from geometries import flat_geometry
from small_models import batch_norm_cnn, case

STEPS = 5  # of the inner loop: with the last objective, six products
SOLVERS = [
    ("diagonal", "heavy-ball"),
    ("diagonal", "adam"),
    ("diagonal", "line-search"),
    ("diagonal", "cg"),
    ("e-kfac", "heavy-ball"),
    ("e-kfac", "adam"),
    ("kfac", "line-search"),
    ("kfac", "cg"),
]


class Watched:
    """Keeps the reports of a geometry, and counts its linearisations and products."""

    def __init__(self, geometry, reports):
        self.geometry, self.reports = geometry, reports
        self.linearisations = self.products = 0
        self.fails = False
        self._linearise, geometry.linearizer.linearise = geometry.linearizer.linearise, self._counted

    def _counted(self, problem):
        self.linearisations += 1
        model = self._linearise(problem)

        def product(v):
            if self.fails:
                raise torch.linalg.LinAlgError("singular")
            self.products += 1
            return model.product(v)

        return replace(model, product=product)

    def __getattr__(self, name):
        if "geometry" not in self.__dict__:  # while it is being copied
            raise AttributeError(name)
        return getattr(self.geometry, name)


def geometry_of(drawn, **options):
    settings = {"steps": STEPS, "engine": "double-backward", "lr": 0.05, "ema": 0.5, "every": 4} | options
    reports = []
    return Watched(flat_geometry(drawn.model, drawn.loss_fn, on_refresh=reports.append, **settings), reports)


def both(drawn, **options):
    return geometry_of(drawn, **options), geometry_of(drawn, **options, spread=True)


def walk(geometry, batch, steps, between=lambda: None):
    """Optimizer steps without an optimizer."""
    for _ in range(steps):
        geometry.refresh_if_due(batch if geometry.due else None)
        geometry.advance()
        between()


def assert_equal_metrics(a, b):
    mine, theirs = a.metric.named_factors(), b.metric.named_factors()
    assert a.metric.learned
    assert mine.keys() == theirs.keys()
    assert all(factor.equal(theirs[name]) for name, factor in mine.items())


def without_time(reports):
    return [replace(report, seconds=0.0) for report in reports]


# -- the same result ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 3, 6, 20])
@pytest.mark.parametrize(("structure", "solver"), SOLVERS)
def test_the_burst_and_the_spread_are_equal_bit_by_bit_while_the_weights_stand_still(structure, solver, every):
    drawn = case("mlp")
    burst, spread = both(drawn, structure=structure, solver=solver, every=every)
    for geometry in (burst, spread):
        walk(geometry, drawn.batch, 3 * every)
    assert [report.step for report in spread.reports] == [0, every, 2 * every]
    assert all(report.accepted for report in spread.reports)
    assert without_time(spread.reports) == without_time(burst.reports)
    assert_equal_metrics(spread, burst)


@pytest.mark.parametrize("every", [1, 2, 6])
@pytest.mark.parametrize("structure", ["diagonal", "e-kfac"])
def test_so_they_are_when_not_every_step_makes_a_product(structure, every):
    drawn = case("mlp")
    burst, spread = both(drawn, structure=structure, every=every, product_every=3)
    for geometry in (burst, spread):
        walk(geometry, drawn.batch, 3 * every)
    assert without_time(spread.reports) == without_time(burst.reports)
    assert_equal_metrics(spread, burst)
    assert spread.products == burst.products == 3 * 4  # of each refresh: steps 0, 1 and 3, and the last objective


@pytest.mark.parametrize(
    "options",
    [
        {"engine": "forward"},
        {"engine": "linearised"},
        {"engine": "finite-differences"},
        {"engine": "one-sided-differences"},
        {"engine": "forward", "divergence": "newton"},
        {"micro_batch": 2},
        {"structure": {"0.*": "identity", "*": "e-kfac"}, "damping": 0.3, "bounds": (0.9, 1.1)},
        {"structure": "identity"},
    ],
    ids=str,
)
def test_weights_buffers_and_batch_may_move_once_it_has_begun(options):
    """Everything the refresh is made from is overwritten in place between its products."""
    drawn, moving = case("batch-norm-cnn"), case("batch-norm-cnn")
    burst = geometry_of(drawn, **options)
    burst.refresh(drawn.batch)
    spread = geometry_of(moving, spread=True, **options)

    @torch.no_grad()
    def train():
        for tensor in [*moving.model.state_dict().values(), *moving.batch]:
            tensor.add_(1) if tensor.is_floating_point() else tensor.zero_()

    walk(spread, moving.batch, 4, between=train)
    assert without_time(spread.reports) == without_time(burst.reports)
    for name, factor in burst.metric.named_factors().items():
        assert factor.equal(spread.metric.named_factors()[name])


def test_the_refresh_begins_where_the_weights_are_then():
    burst, spread = (geometry_of(case("mlp"), spread=spread) for spread in (False, True))
    batch = case("mlp").batch
    for geometry in (burst, spread):

        @torch.no_grad()
        def descend(geometry=geometry):
            for parameter in geometry.parameters.values():
                parameter.mul_(0.9)

        walk(geometry, batch, 8, between=descend)
    assert without_time(spread.reports) == without_time(burst.reports)
    assert_equal_metrics(spread, burst)


# -- the share of a step -----------------------------------------------------------------------------------------------


@given(st.integers(1, 12), st.integers(1, 30))
def test_no_step_makes_more_than_its_share(steps, every):
    drawn = case("mlp")
    geometry = geometry_of(drawn, steps=steps, every=every, spread=True)
    made = []
    for _ in range(2 * every):
        before = geometry.linearisations, geometry.products
        walk(geometry, drawn.batch, 1)
        made.append((geometry.linearisations - before[0], geometry.products - before[1]))
    assert max(products for _, products in made) <= -(-(steps + 1) // every)
    for period in (made[:every], made[every:]):
        assert [linearised for linearised, _ in period] == [1] + [0] * (every - 1)
        assert sum(products for _, products in period) == steps + 1
    assert [report.step for report in geometry.reports] == [0, every]


def test_a_burst_is_one_long_step():
    drawn = case("mlp")
    geometry = geometry_of(drawn)
    walk(geometry, drawn.batch, 1)
    assert (geometry.linearisations, geometry.products) == (1, STEPS + 1)


def test_the_period_is_fixed_when_a_refresh_begins():
    drawn = case("mlp")
    asked = []

    def every(step):
        asked.append(step)
        return 2 if step == 0 else 7

    geometry = geometry_of(drawn, every=every, spread=True)
    products = []
    for _ in range(9):
        walk(geometry, drawn.batch, 1)
        products.append(geometry.products)
    assert asked == [0, 2]
    assert products == [3, 6, 6, 7, 8, 9, 10, 11, 12]


def test_until_the_first_is_finished_the_metric_is_the_identity():
    drawn = case("mlp")
    geometry = geometry_of(drawn, every=3, spread=True)
    parameters = [*drawn.model.parameters()]
    grads = [torch.ones_like(parameter) for parameter in parameters]
    for learned in (False, False, True):
        walk(geometry, drawn.batch, 1)
        moved = geometry.transport(parameters, grads)
        assert geometry.metric.learned == learned
        assert all(a.equal(b) for a, b in zip(moved, grads, strict=True)) != learned


def test_a_step_that_is_repeated_owes_nothing_more():
    drawn = case("mlp")
    geometry = geometry_of(drawn, spread=True)
    walk(geometry, drawn.batch, 2)
    geometry.refresh_if_due(None)
    made = geometry.products
    geometry.refresh_if_due(None)
    assert geometry.products == made


# -- by hand, and when it goes wrong -----------------------------------------------------------------------------------


def test_a_refresh_by_hand_is_whole_and_drops_the_one_in_progress():
    drawn = case("mlp")
    burst, spread = both(drawn)
    walk(spread, drawn.batch, 2)
    report = spread.refresh(drawn.batch)
    assert report.step == 2
    assert report.accepted
    burst.refresh(drawn.batch)
    assert_equal_metrics(spread, burst)
    made = spread.products
    walk(spread, drawn.batch, 4)
    assert spread.products == made
    assert spread.due  # the period began anew, at step 2
    assert spread.refreshes == len(spread.reports) == 1


def test_both_ways_tell_a_subclass():
    drawn = case("mlp")
    for geometry in both(drawn, every=2):
        walk(geometry, drawn.batch, 4)
        assert [report.step for report in geometry.reports] == [0, 2]
        geometry.refresh(drawn.batch)
        assert geometry.reports[2].step == 4


def test_one_that_fails_keeps_the_metric_and_is_counted():
    drawn = case("mlp")
    geometry = geometry_of(drawn, spread=True, max_failures=2)
    walk(geometry, drawn.batch, 4)
    before = {name: factor.clone() for name, factor in geometry.metric.named_factors().items()}
    bad = drawn.batch[0] * float("nan"), drawn.batch[1]
    walk(geometry, bad, 3)
    with pytest.warns(llqr.RefreshWarning, match="refresh at step 4: kept the old metric, because the loss"):
        walk(geometry, bad, 1)
    assert all(factor.equal(before[name]) for name, factor in geometry.metric.named_factors().items())
    assert (geometry.refreshes, geometry.failures) == (2, 1)
    walk(geometry, bad, 3)
    with pytest.raises(llqr.RefreshError, match="2 in a row"):
        walk(geometry, bad, 1)
    geometry.advance()
    walk(geometry, drawn.batch, 4)
    assert geometry.reports[-1].accepted


def test_a_decomposition_that_fails_half_way_ends_it():
    drawn = case("mlp")
    geometry = geometry_of(drawn, spread=True)
    walk(geometry, drawn.batch, 2)
    geometry.fails = True
    with pytest.warns(llqr.RefreshWarning, match=r"failed \(singular\)"):
        walk(geometry, drawn.batch, 1)
    geometry.fails = False
    assert not geometry.due
    walk(geometry, drawn.batch, 5)
    assert [report.accepted for report in geometry.reports] == [False, True]
    assert [report.step for report in geometry.reports] == [0, 4]


def test_one_that_cannot_begin_stays_due():
    drawn = case("mlp")
    geometry = geometry_of(drawn, spread=True)
    with pytest.raises(RuntimeError):
        geometry.refresh_if_due((torch.ones(7, 9, dtype=torch.float64), drawn.batch[1]))
    assert geometry.due
    walk(geometry, drawn.batch, 4)
    assert [report.accepted for report in geometry.reports] == [True]


# -- in a training loop ------------------------------------------------------------------------------------------------


def training(name="llqr+sam", **options):
    """A network with BatchNorm and dropout, its optimizer, and a step that asks for no more than it must."""
    model = batch_norm_cnn()
    drawn = case("batch-norm-cnn")
    drawn.model = model
    geometry = geometry_of(drawn, spread=True, **options)
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    opt = llqr.build(name, base, geometry=geometry, **({"rho": 0.1} if "sam" in name else {}))
    return model, opt


def run(model, opt, steps):
    for step in range(opt.steps, opt.steps + steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(6, 1, 5, 5, generator=generator, dtype=torch.float64)
        y = torch.randint(3, (6,), generator=generator)
        torch.manual_seed(step)

        def closure(x=x, y=y):
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        opt.step(closure, batch=(x, y) if opt.geometry.due else None)


def test_the_model_trains_on_undisturbed():
    """Before the metric is learned, training with the refresh beside it is training without one, bit by bit."""
    model, opt = training(every=6)
    run(model, opt, 5)
    plain = batch_norm_cnn()
    drawn = case("batch-norm-cnn")
    drawn.model = plain
    never = geometry_of(drawn, every=100)
    never.geometry._next = 100
    base = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    run(plain, llqr.build("llqr+sam", base, geometry=never, rho=0.1), 5)
    assert opt.geometry.products == 5
    assert all(module.training for module in model.modules())
    assert all(tensor.equal(plain.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_a_step_that_needs_a_batch_says_so():
    model, opt = training(every=2)
    run(model, opt, 2)
    with pytest.raises(ValueError, match="batch: a refresh is due at step 2"):
        opt.step(lambda: None)


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@functools.cache
def trained_straight(**options):
    model, opt = training(**options)
    run(model, opt, 12)
    return model, opt


EXTRAPOLATED = {"structure": "e-kfac", "product_every": 2}
OTHERS = ({"structure": "e-kfac"}, {"structure": "diagonal", "solver": "adam"}, {"structure": "kfac", "solver": "cg"})


@pytest.mark.parametrize(
    ("settings", "after"),
    [*((EXTRAPOLATED, after) for after in range(1, 9)), *((other, after) for other in OTHERS for after in (2, 5))],
    ids=str,
)
def test_a_run_saved_in_the_middle_of_a_refresh_goes_on_bit_by_bit(settings, after):
    options = settings | {"every": 4, "micro_batch": 4 if after % 2 else None}
    straight, first, second = trained_straight(**options), training(**options), training(**options)
    run(*first, after)
    saved = through_a_file([part.state_dict() for part in first])
    assert (saved[1]["llqr"]["geometry"]["refresh"] is None) == (after % 4 == 0)
    run(*first, 3)  # what was saved must not change with the one that goes on
    run(*second, 5)  # nor may anything of the one that loads stay behind
    for part, state in zip(second, saved, strict=True):
        part.load_state_dict(state)
    second_state = second[1].geometry.state_dict()["refresh"]  # before it has gone on, too
    assert (second_state is None) == (after % 4 == 0)
    run(*second, 12 - after)
    for name, tensor in straight[0].state_dict().items():
        assert tensor.equal(second[0].state_dict()[name]), name
    assert_equal_metrics(second[1].geometry, straight[1].geometry)
    assert without_time(second[1].geometry.reports[-1:]) == without_time(straight[1].geometry.reports[-1:])


def test_a_state_in_memory_does_not_move():
    _, opt = model_and_opt = training()
    run(*model_and_opt, 2)
    state = opt.geometry.state_dict()["refresh"]
    kept = copy.deepcopy(state)
    run(*model_and_opt, 5)
    assert all(a.equal(b) for a, b in zip(state["weights"], kept["weights"], strict=True))
    assert all(a.equal(b) for a, b in zip(state["batch"], kept["batch"], strict=True))


def test_a_copy_of_a_geometry_in_the_middle_of_a_refresh_finishes_it():
    drawn = case("mlp")
    geometry = geometry_of(drawn, spread=True)
    walk(geometry, drawn.batch, 2)
    copied = copy.deepcopy(geometry)
    for one in (geometry, copied):
        walk(one, None, 2)
    assert_equal_metrics(copied, geometry)


def test_states_that_cannot_be_finished_are_refused():
    drawn = case("mlp")
    burst, spread = both(drawn)
    walk(spread, drawn.batch, 2)
    with pytest.raises(ValueError, match=r"state_dict: .* needs spread=True"):
        burst.load_state_dict(spread.state_dict())
    state = spread.state_dict()
    state["refresh"]["weights"].append(torch.zeros(3))
    fresh = geometry_of(case("mlp"), spread=True)
    with pytest.raises(ValueError, match=r"state_dict: .* other parameters or buffers"):
        fresh.load_state_dict(state)
    assert fresh.due
    walk(spread, None, 2)
    burst.load_state_dict(spread.state_dict())  # nothing is in progress now
    assert_equal_metrics(burst, spread)

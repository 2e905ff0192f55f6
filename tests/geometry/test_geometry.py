"""The geometry: schedule, what a refresh reports, memory and state."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import llqr
from dense_blocks import dense_blocks
from geometries import flat_geometry
from llqr.inner import Objective
from references import relative_error
from small_models import case, mlp


def geometry_of(drawn, **options):
    return flat_geometry(drawn.model, drawn.loss_fn, **{"steps": 3, "engine": "double-backward"} | options)


def walk(geometry, batch, steps):
    """The steps of `steps` optimizer steps at which the metric was refreshed."""
    refreshed = []
    for step in range(steps):
        if geometry.due:
            refreshed.append(step)
            assert geometry.refresh(batch).step == step
        geometry.advance()
    return refreshed


# -- schedule ----------------------------------------------------------------------------------------------------------


def test_the_first_refresh_comes_before_step_0():
    drawn = case("mlp")
    geometry = geometry_of(drawn, every=4)
    assert geometry.due
    assert walk(geometry, drawn.batch, 10) == [0, 4, 8]
    assert geometry.refreshes == 3


def test_every_may_be_a_function_of_the_step():
    drawn = case("mlp")
    assert walk(geometry_of(drawn, every=lambda step: 1 if step < 3 else 5), drawn.batch, 14) == [0, 1, 2, 3, 8, 13]
    often = geometry_of(drawn, every=lambda step: 0.2)
    often.refresh(drawn.batch)
    assert not often.due  # one step has to pass, whatever the function says
    often.advance()
    assert often.due


def test_a_refresh_by_hand_starts_the_period_anew():
    drawn = case("mlp")
    geometry = geometry_of(drawn, every=4)
    walk(geometry, drawn.batch, 2)
    geometry.refresh(drawn.batch)
    assert walk_from(geometry, drawn.batch, 2, 8) == [6]


def walk_from(geometry, batch, start, stop):
    refreshed = []
    for step in range(start, stop):
        if geometry.due:
            refreshed.append(step)
            geometry.refresh(batch)
        geometry.advance()
    return refreshed


def test_a_refresh_needs_derivatives():
    drawn = case("mlp")
    geometry = flat_geometry(drawn.model, F.cross_entropy, steps=2)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inside inference_mode"):
        geometry.refresh(drawn.batch)
    with torch.no_grad():
        assert geometry.refresh(drawn.batch).accepted


def test_ema_and_lr_may_be_functions_of_the_step():
    drawn = case("mlp")
    asked = {"ema": [], "lr": []}

    def noted(name, value):
        return lambda step: (asked[name].append(step), value(step))[1]

    scheduled = geometry_of(
        drawn, every=2, ema=noted("ema", lambda s: 0.5 + s / 10), lr=noted("lr", lambda s: 0.1 / (1 + s))
    )
    walk(scheduled, drawn.batch, 3)
    assert {name: sorted(set(steps)) for name, steps in asked.items()} == {"ema": [0, 2], "lr": [0, 2]}
    by_hand = geometry_of(drawn, ema=0.5, lr=0.1)
    by_hand.refresh(drawn.batch)
    after = geometry_of(drawn, ema=0.7, lr=0.1 / 3)
    after.metric.load_state_dict(by_hand.metric.state_dict())
    after.refresh(drawn.batch)
    for name, factor in scheduled.metric.named_factors().items():
        assert factor.equal(after.metric.named_factors()[name])


@pytest.mark.parametrize(("divergence", "ema"), [("ngd", 0.95), ("newton", 0.9)])
def test_the_default_moving_average_is_the_divergences(divergence, ema):
    drawn = case("mlp")
    default, explicit = geometry_of(drawn, divergence=divergence), geometry_of(drawn, divergence=divergence, ema=ema)
    default.refresh(drawn.batch)
    explicit.refresh(drawn.batch)
    for name, factor in default.metric.named_factors().items():
        assert factor.equal(explicit.metric.named_factors()[name])


def test_refreshes_start_from_the_metric_they_find():
    """Two refreshes without a moving average are one of twice the steps, up to the momentum lost between them."""
    drawn = case("mlp")
    options = {"structure": "diagonal", "momentum": 0.0, "ema": 0.0, "lr": 0.05}
    twice, once = geometry_of(drawn, steps=3, **options), geometry_of(drawn, steps=6, **options)
    first, second, whole = twice.refresh(drawn.batch), twice.refresh(drawn.batch), once.refresh(drawn.batch)
    assert second.objective_before == pytest.approx(first.objective_after, rel=1e-12)
    assert second.objective_after == pytest.approx(whole.objective_after, rel=1e-12)
    for name, factor in twice.metric.named_factors().items():
        assert relative_error(factor, once.metric.named_factors()[name]) < 1e-13


# -- what a refresh says -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "structure", ["scalar", "diagonal", "kfac", "e-kfac", "diag-kfac", "dense", "kfac-psd", "e-kfac-psd"]
)
@pytest.mark.parametrize("divergence", ["ngd", "newton"])
def test_a_refresh_lowers_the_objective(structure, divergence):
    drawn = case("vit")
    geometry = geometry_of(drawn, structure=structure, divergence=divergence, steps=5)
    refresh = geometry.refresh(drawn.batch)
    assert refresh.accepted
    assert refresh.reason == ""
    assert refresh.objective_after < refresh.objective_before
    assert refresh.step == 0
    assert refresh.engine == "double-backward"
    assert refresh.seconds > 0
    assert geometry.metric.learned
    drawn.model.eval()
    loss = F.cross_entropy(drawn.model(drawn.batch[0]), drawn.batch[1])
    assert refresh.loss == pytest.approx(loss.item(), rel=1e-12)


@pytest.mark.parametrize(
    ("dtype", "autocast", "precision"),
    [
        (torch.float32, None, None),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float16, None),
        (torch.float32, torch.float64, None),  # to which torch does not autocast
        (torch.float64, torch.bfloat16, None),
    ],
)
def test_the_factors_products_follow_the_autocast_of_the_refresh(dtype, autocast, precision, monkeypatch):
    drawn = case("mlp")
    seen = []

    class Noted(Objective):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            seen.append(self.precision)

    monkeypatch.setattr("llqr.geometry.Objective", Noted)
    geometry = flat_geometry(drawn.model.to(dtype), F.cross_entropy, structure="kfac", steps=3, autocast=autocast)
    assert geometry.refresh((drawn.batch[0].to(dtype), drawn.batch[1])).accepted
    assert seen == [precision]


def test_bounds_hold_after_a_refresh():
    drawn = case("mlp")
    geometry = geometry_of(drawn, structure="dense", bounds=(0.99, 1.005), steps=20, lr=0.2, ema=0.0)
    assert geometry.refresh(drawn.batch).accepted
    values = [
        torch.linalg.eigvalsh(m)
        for g, f in zip(geometry.metric.groups, geometry.metric.factors(), strict=True)
        for m in dense_blocks(g, f)
    ]
    spectrum = torch.cat(values)
    assert spectrum.min() == pytest.approx(0.99, abs=1e-9)
    assert spectrum.max() <= 1.005 + 1e-9


# -- use ---------------------------------------------------------------------------------------------------------------


def test_transport_is_apply_beside_the_parameters():
    drawn = case("vit-fused")
    geometry = geometry_of(drawn, structure="e-kfac", lr=0.05)
    parameters = [*geometry.parameters.values()]
    stranger = nn.Parameter(torch.ones(2))
    grads = [torch.randn_like(p) for p in parameters]
    unlearned = geometry.transport([*parameters, stranger], [*grads, stranger.data])
    assert all(a is b for a, b in zip(unlearned, [*grads, stranger.data], strict=True) if a.shape != (2,))
    geometry.refresh(drawn.batch)
    moved = geometry.transport([stranger, *reversed(parameters)], [stranger.data, *reversed(grads)])
    assert moved[0].equal(stranger.data)
    expected = geometry.metric.apply(dict(zip(geometry.parameters, grads, strict=True)))
    assert all(a.equal(b) for a, b in zip(reversed(moved[1:]), expected.values(), strict=True))


def test_a_fixed_geometry():
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    geometry = llqr.FixedGeometry([(first, lambda g: 3 * g)])
    moved = geometry.transport([second, first], [torch.ones(3), torch.ones(2)])
    assert moved[0].tolist() == [1.0, 1.0, 1.0]
    assert moved[1].tolist() == [3.0, 3.0]
    assert not geometry.due
    geometry.advance()
    geometry.load_state_dict(geometry.state_dict())
    with pytest.raises(ValueError, match="state_dict: a fixed geometry holds no state"):
        geometry.load_state_dict({"metric": {}})


# -- memory ------------------------------------------------------------------------------------------------------------


def test_memory_is_announced_before_it_is_allocated():
    drawn = case("mlp")
    geometry = geometry_of(drawn, structure="kfac")
    planned = {"kfac": 8 * (6**2 + 4**2 + 3**2 + 6**2), "diagonal": 8 * 9}
    total = sum(planned.values())
    assert geometry.memory() == planned | {"total": total, "allocated": 0}
    geometry.refresh(drawn.batch)
    assert geometry.memory() == planned | {"total": total, "allocated": total}


def test_bfloat16_halves_what_float32_takes():
    drawn = case("mlp")
    model, batch = drawn.model.float(), (drawn.batch[0].float(), drawn.batch[1])
    sizes = {}
    for dtype in (torch.float32, torch.bfloat16):
        geometry = flat_geometry(model, F.cross_entropy, structure="e-kfac", dtype=dtype, steps=2)
        geometry.refresh(batch)
        sizes[dtype] = geometry.memory()["allocated"]
    assert sizes[torch.float32] == 2 * sizes[torch.bfloat16]


# -- state -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "structure", ["scalar", "diagonal", "e-kfac", "kfac-psd", {"0.*": "identity", "*": "dense"}], ids=str
)
def test_a_resumed_geometry_goes_on_bit_by_bit(structure):
    drawn = case("mlp")
    options = {"structure": structure, "every": 2, "lr": 0.05, "engine": "auto"}
    whole, first, second = (geometry_of(drawn, **options) for _ in range(3))
    walk(whole, drawn.batch, 5)
    walk(first, drawn.batch, 3)
    second.load_state_dict(first.state_dict())
    assert second.refreshes == first.refreshes == 2
    assert second.engine == first.engine != "auto"
    assert walk_from(second, drawn.batch, 3, 5) == [4]
    for name, factor in whole.metric.named_factors().items():
        assert factor.equal(second.metric.named_factors()[name])


def test_a_state_survives_saving(tmp_path):
    drawn = case("mlp")
    first, second = geometry_of(drawn, structure="e-kfac"), geometry_of(drawn, structure="e-kfac")
    first.refresh(drawn.batch)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for name, factor in first.metric.named_factors().items():
        assert factor.equal(second.metric.named_factors()[name])
    assert not second.due


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            lambda: flat_geometry(mlp(), F.cross_entropy, structure="kfac"),
            "differs in the structure of 0.weight, 2.weight",
        ),
        (
            lambda: flat_geometry(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)).double(), F.cross_entropy),
            "differs in the structure of 1.bias, 1.weight, 2.bias, 2.weight",
        ),
        (
            lambda: flat_geometry(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), F.cross_entropy),
            r"factor '0.weight' is of shape \(6, 4\), expected shape \(6, 5\)",
        ),
    ],
    ids=["structure", "names", "shape"],
)
def test_a_state_that_does_not_fit_is_refused(other, message):
    drawn = case("mlp")
    saved = geometry_of(drawn)
    saved.refresh(drawn.batch)
    loader = other()
    with pytest.raises(ValueError, match=f"^state_dict: .*{message}"):
        loader.load_state_dict(saved.state_dict())
    assert not loader.metric.learned
    assert loader.refreshes == 0


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, r"every: expected a number in \[1, inf\)"),
        ({"every": "often"}, "every: expected a number"),
        ({"ema": 1.5}, r"ema: expected a number in \[0, 1\]"),
        ({"lr": -1}, "lr: expected a number"),
        ({"damping": -1}, "damping: expected a number >= 0"),
        ({"steps": 0}, "steps: expected a number >= 1"),
        ({"solver": "sgd"}, "solver: unknown 'sgd'"),
        ({"divergence": "kl"}, "divergence: unknown 'kl'; choose one of newton, ngd"),
        ({"structure": "full"}, "structure: unknown structure 'full'"),
        ({"bounds": (2, 3)}, "bounds: need 0 < u_min <= 1 <= u_max"),
        ({"dtype": torch.int64}, "dtype: expected bfloat16, float32 or float64"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        flat_geometry(mlp(), F.cross_entropy, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float32"}, r"dtype: expected a torch.dtype, such as torch.float32, got 'float32'"),
        ({"autocast": "bf16"}, "autocast: expected a torch.dtype"),
        ({"capture": "yes"}, "capture: expected True or False"),
        ({"compile": 1}, "compile: expected True or False"),
        ({"compile": True}, "compile: only with engine='linearised'"),
        ({"micro_batch": 2.5}, "micro_batch: expected a positive number of samples"),
        ({"max_failures": 0}, "max_failures: expected a whole number of at least 1"),
        ({"max_side": "big"}, "max_side: expected a whole number of at least 1"),
        ({"engine": None}, "engine: unknown None"),
        ({"solver": []}, r"solver: unknown \[\]"),
        ({"structure": None}, "structure: expected a name, or patterns -> names, got None"),
        ({"forward": 3}, "forward: expected a function of the model and its inputs, got int"),
        ({"on_refresh": 3}, "on_refresh: expected a function of a report, got int"),
        ({"every": float("inf")}, "every: expected a number"),
        ({"lr": float("nan")}, "lr: expected a number"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_of_another_kind_are_named_at_once(options, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        flat_geometry(mlp(), F.cross_entropy, **options)


@pytest.mark.parametrize("given", [{"steps": 5}, llqr.Inner])
@pytest.mark.parametrize(("name", "kind"), [("inner", "Inner"), ("runtime", "Runtime")])
def test_settings_that_are_no_settings_are_named(name, kind, given):
    with pytest.raises(TypeError, match=rf"^{name}: expected a llqr\.{kind}, got "):
        llqr.Geometry(mlp(), F.cross_entropy, **{name: given})


@pytest.mark.parametrize("name", ["every", "ema"])
def test_a_schedule_that_is_not_finite_is_named(name):
    drawn = case("mlp")
    geometry = geometry_of(drawn, **{name: lambda step: float("nan")})
    with pytest.raises(ValueError, match=rf"^{name}: expected a number in \[.*, got nan at step 0"):
        geometry.refresh(drawn.batch)


@pytest.mark.parametrize(
    ("name", "value", "range_"), [("ema", 1.5, r"\[0, 1\]"), ("every", -5, r"\[0, inf\)"), ("lr", -1, r"\[0, inf\)")]
)
def test_a_schedule_that_leaves_its_range_is_named(name, value, range_):
    drawn = case("mlp")
    geometry = geometry_of(drawn, **{name: lambda step: value})
    with pytest.raises(ValueError, match=rf"^{name}: expected a number in {range_}, got {value} at step 0"):
        geometry.refresh(drawn.batch)


def test_bad_models_are_named():
    with pytest.raises(TypeError, match=r"model: expected an nn.Module, got function"):
        flat_geometry(lambda x: x, F.cross_entropy)
    with pytest.raises(TypeError, match="loss_fn: expected a function of outputs and targets, got str"):
        flat_geometry(mlp(), "cross_entropy")
    with pytest.raises(ValueError, match="model: no parameter requires a gradient"):
        flat_geometry(mlp().requires_grad_(False), F.cross_entropy)
    with pytest.raises(ValueError, match="model: parameter 'weight' is complex"):
        flat_geometry(nn.Linear(2, 2, dtype=torch.complex64), F.cross_entropy)
    with pytest.raises(ValueError, match=r"model: parameter '1\.weight' has no shape yet \(a lazy module\).* call"):
        flat_geometry(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2)), F.cross_entropy)


@pytest.mark.parametrize(("solver", "structure"), [("pcg", "e-kfac"), ("pcg", "dense")])
def test_a_solver_that_cannot_learn_the_structure_is_refused_when_the_geometry_is_made(solver, structure):
    with pytest.raises(ValueError, match=f"solver: '{solver}' .* {structure} .*; choose heavy-ball or adam"):
        llqr.Geometry(nn.Linear(4, 3), F.cross_entropy, structure=structure, inner=llqr.Inner(solver))

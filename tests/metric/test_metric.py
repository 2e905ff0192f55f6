"""The metric as a whole: apply by name, dtypes, moving average, memory and state."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from geometries import flat_geometry
from llqr import Metric
from llqr.metric import STRUCTURES
from references import dense_metric, flat, relative_error, trainable, unflat
from small_models import batch_norm_cnn, case, mlp, translator, vit

KINDS = sorted(STRUCTURES.keys() - {"identity"})  # those that learn


def perturbed(metric, seed=0, spread=0.2):
    """The metric with random factors."""
    generator = torch.Generator().manual_seed(seed)

    def random(factor):
        return (factor + spread * torch.randn(factor.shape, generator=generator)).to(factor.dtype)

    metric.assign([{name: random(factor) for name, factor in group.items()} for group in metric.factors()])
    return metric


def random_like(parameters, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        n: torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype) for n, p in parameters.items()
    }


@pytest.mark.parametrize("model", [mlp, batch_norm_cnn, vit, lambda: vit(fused=True), translator])
@pytest.mark.parametrize("kind", KINDS)
def test_apply_equals_the_dense_metric(kind, model):
    parameters = trainable(model())
    metric = perturbed(Metric(model(), structure=kind))
    grads = random_like(parameters)
    assert relative_error(flat(metric.apply(grads)), dense_metric(metric, parameters) @ flat(grads)) < 1e-12


def test_a_mixture_of_structures_equals_the_dense_metric():
    model = vit(fused=True)
    rules = {
        "attention.qkv.*": "kfac",
        "norm1.*": "identity",
        "positions": "diag-kfac",
        "head.*": "dense",
        "narrow.*": "scalar",
        "*.bias": "diagonal",
        "*": "e-kfac-psd",
    }
    metric = perturbed(Metric(model, structure=rules))
    grads = random_like(trainable(model))
    Ug = metric.apply(grads)
    assert relative_error(flat(Ug), dense_metric(metric, trainable(model)) @ flat(grads)) < 1e-12
    assert Ug["norm1.weight"].equal(grads["norm1.weight"])


@given(seed=st.integers(0, 2**31 - 1), a=st.floats(-3, 3), b=st.floats(-3, 3), kind=st.sampled_from(KINDS))
def test_apply_is_linear(seed, a, b, kind):
    model = vit(fused=True)
    metric = perturbed(Metric(model, structure=kind), seed)
    x, y = random_like(trainable(model), seed), random_like(trainable(model), seed + 1)
    combined = metric.apply({name: a * x[name] + b * y[name] for name in x})
    first, second = metric.apply(x), metric.apply(y)
    for name, part in combined.items():
        torch.testing.assert_close(part, a * first[name] + b * second[name], rtol=1e-11, atol=1e-11)


def test_gradients_are_copied_in_the_memory_order_that_they_have():
    """A copy to another order is a kernel launch per convolution."""
    network = batch_norm_cnn().to(memory_format=torch.channels_last)
    metric = Metric(network, structure="e-kfac")
    parameters = trainable(network)
    for group, part in zip(metric.groups, metric.pack(parameters), strict=True):
        for block, place in zip(group.blocks, group.unpack(part), strict=True):
            assert place.stride() == parameters[block.parameter].stride()


def convolutions():
    """Channels last, of two and three dimensions, wide and tall, stacked, with kernel sides and channels of one."""
    flat = [nn.Conv2d(3, 4, (2, 3)), nn.Conv2d(3, 4, (2, 3)), nn.Conv2d(2, 9, 2), nn.Conv2d(3, 4, (1, 3))]
    flat += [nn.ConvTranspose2d(3, 2, 2), nn.Conv2d(4, 4, 2, groups=4)]
    network = nn.ModuleList(flat).to(memory_format=torch.channels_last)
    network.append(nn.Conv3d(2, 3, 2).to(memory_format=torch.channels_last_3d))
    return network.double()


@pytest.mark.parametrize("kind", KINDS)
def test_channels_last_convolutions_equal_the_dense_metric(kind):
    network = convolutions()
    metric = perturbed(Metric(network, structure=kind))
    grads = {name: torch.randn_like(p) for name, p in trainable(network).items()}
    expected = dense_metric(metric, trainable(network)) @ flat(grads)
    for Ug in (metric.apply(grads), metric.apply(grads, metric.factors())):
        assert relative_error(flat(Ug), expected) < 1e-12
        assert all(Ug[name].stride() == grad.stride() for name, grad in grads.items())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if STRUCTURES[kind].multiplies])
def test_the_memory_order_of_a_gradient_is_never_changed(kind):
    """That would be two passes over all gradients per step."""
    network = convolutions()
    metric = perturbed(Metric(network, structure=kind))
    packed = metric.pack({name: torch.randn_like(p) for name, p in trainable(network).items()})
    with Recorded() as recorded:
        for group, own, g in zip(metric.groups, metric.factors(), packed, strict=True):
            group.unpack(group.apply(own, g))
    assert not recorded.names & {"aten::clone", "aten::copy_", "aten::_to_copy"}


class Recorded(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function._schema.name)
        return function(*args, **(kwargs or {}))


def test_matrices_of_one_shape_and_several_memory_orders():
    """A linear layer and convolutions; those in the same memory order share a stack."""
    network = nn.ModuleList([nn.Linear(12, 4), nn.Conv2d(12, 4, 1), nn.Conv2d(3, 4, 2), nn.Conv1d(3, 4, 4)]).double()
    network.to(memory_format=torch.channels_last)
    metric = perturbed(Metric(network, structure="kfac"))
    assert [len(group.blocks) for group in metric.groups if group.name == "kfac"] == [3, 1]
    grads = {name: torch.randn_like(p) for name, p in trainable(network).items()}
    Ug = metric.apply(grads)
    assert all(Ug[name].stride() == grad.stride() for name, grad in grads.items())
    assert relative_error(flat(Ug), dense_metric(metric, trainable(network)) @ flat(grads)) < 1e-12


def test_an_unlearned_metric_returns_the_gradients_themselves():
    metric = Metric(mlp(), structure="e-kfac")
    grads = random_like(trainable(mlp()))
    assert not metric.learned
    assert all(part is grads[name] for name, part in metric.apply(grads).items())


@pytest.mark.parametrize("kind", KINDS)
def test_some_parameters_only(kind):
    """A parameter without a gradient changes nothing for the others; an unknown name passes unchanged."""
    model = vit(fused=True)
    metric = perturbed(Metric(model, structure=kind))
    grads = random_like(trainable(model))
    whole = metric.apply(grads)
    some = {name: grads[name] for name in ("attention.qkv.bias", "head.weight", "token")} | {"other": torch.ones(2)}
    Ug = metric.apply(some)
    assert set(Ug) == set(some)
    assert Ug.pop("other").equal(torch.ones(2))
    for name, part in Ug.items():
        assert part.shape == grads[name].shape
        assert relative_error(part, whole[name]) < 1e-14


def test_candidates_are_tried_without_being_assigned():
    metric = Metric(mlp(), structure="kfac")
    candidate = perturbed(Metric(mlp(), structure="kfac")).factors()
    grads = random_like(trainable(mlp()))
    Ug = metric.apply(grads, candidate)
    assert not metric.learned
    metric.assign(candidate)
    assert all(part.equal(Ug[name]) for name, part in metric.apply(grads).items())


@pytest.mark.parametrize("kind", ["kfac", "e-kfac", "diagonal"])
def test_memory_formats_of_gradients_do_not_matter(kind):
    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Conv2d(2, 6, 3)
            self.conv = nn.Conv2d(2, 4, 3)

    model = Fused().double()
    metric = perturbed(Metric(model, structure=kind))
    grads = random_like(trainable(model))
    strided = {n: g.to(memory_format=torch.channels_last) if g.ndim == 4 else g for n, g in grads.items()}
    assert not strided["qkv.weight"].is_contiguous()
    Ug = metric.apply(strided)
    assert all(part.equal(Ug[name]) for name, part in metric.apply(grads).items())
    assert all(part.stride() == strided[name].stride() for name, part in Ug.items())


def test_numbers_and_empty_shapes_survive():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.temperature = nn.Parameter(torch.tensor(2.0))

    for kind in KINDS:
        metric = perturbed(Metric(Scaled(), structure=kind))
        Ug = metric.apply({"temperature": torch.tensor(3.0)})["temperature"]
        assert Ug.shape == ()
        assert float(Ug) != 3.0


# -- packing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_pack_and_unpack_are_inverse(kind):
    model = vit(fused=True)
    metric = Metric(model, structure={"norm1.*": "identity", "*": kind})
    grads = random_like(trainable(model))
    back = metric.unpack(metric.pack(grads), grads)
    assert list(back) == list(grads)
    assert all(part.equal(grads[name]) for name, part in back.items())


# -- fused projections -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_fused_projection_learns_what_three_separate_ones_learn(kind):
    separate, fused = case("vit"), case("vit-fused")
    weights = separate.model.state_dict()
    for local in ("weight", "bias"):
        parts = [weights.pop(f"attention.{part}.{local}") for part in "qkv"]
        weights[f"attention.qkv.{local}"] = torch.cat(parts)
    fused.model.load_state_dict(weights)
    learned = {}
    for drawn in (separate, fused):
        geometry = flat_geometry(
            drawn.model, F.cross_entropy, structure=kind, steps=4, lr=0.05, clip=0.1, ema=0.5, engine="double-backward"
        )
        assert geometry.refresh(drawn.batch).accepted
        learned[drawn is fused] = geometry.metric.named_factors()

    def name_in_fused(name):
        for part in "qkv":
            for tail in (f".{part}.weight", f".{part}.bias"):
                name = name.replace(f"attention{tail}", f"attention.qkv.{tail.split('.')[-1]}[{part}]")
            if name == f"attention.{part}":  # a scalar is named after its layer
                name = f"attention.qkv[{part}]"
        return name

    assert {name_in_fused(name) for name in learned[False]} == set(learned[True])
    for name, factor in learned[False].items():
        torch.testing.assert_close(learned[True][name_in_fused(name)], factor, rtol=1e-9, atol=1e-12)


# -- dtypes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["e-kfac", "kfac", "diag-kfac", "diagonal", "scalar", "dense"])
def test_bfloat16_halves_the_bytes_and_stays_close(kind):
    model = mlp(torch.float32)
    wide, narrow = Metric(model, structure=kind), Metric(model, structure=kind, dtype=torch.bfloat16)
    assert narrow.memory()["total"] * 2 == wide.memory()["total"]
    perturbed(wide)
    narrow.assign([{n: f.bfloat16() for n, f in group.items()} for group in wide.factors()])
    assert narrow.memory()["allocated"] * 2 == wide.memory()["allocated"] == wide.memory()["total"]
    grads = random_like(trainable(model))
    Ug = narrow.apply(grads)
    assert all(part.dtype == torch.float32 for part in Ug.values())
    assert 0 < relative_error(flat(Ug), flat(wide.apply(grads))) < 0.02


def test_apply_dtype_only_changes_the_product():
    model = mlp(torch.float32)
    plain = perturbed(Metric(model, structure="e-kfac"))
    fast = perturbed(Metric(model, structure="e-kfac", apply_dtype=torch.bfloat16))
    assert fast.memory() == plain.memory()
    assert all(a.equal(fast.named_factors()[name]) for name, a in plain.named_factors().items())
    grads = random_like(trainable(model))
    assert 0 < relative_error(flat(fast.apply(grads)), flat(plain.apply(grads))) < 0.02
    # New factors must not be used together with low-precision copies of the old ones.
    other = perturbed(Metric(model, structure="e-kfac"), seed=5)
    for metric in (fast, plain):
        metric.assign(other.factors())
        assert relative_error(flat(metric.apply(grads)), flat(other.apply(grads))) < 0.02


@pytest.mark.parametrize("kind", ["e-kfac", "kfac", "dense", "diagonal"])
def test_factors_held_in_bfloat16_are_learned_in_float32(kind):
    drawn = case("mlp")
    model, batch = drawn.model.float(), (drawn.batch[0].float(), drawn.batch[1])
    geometries = [
        flat_geometry(
            model, F.cross_entropy, structure=kind, steps=20, lr=0.02, ema=0.0, dtype=dtype, engine="double-backward"
        )
        for dtype in (None, torch.bfloat16)
    ]
    for geometry in geometries:
        assert geometry.refresh(batch).accepted
    exact, held = (g.metric.named_factors() for g in geometries)
    for name, factor in held.items():
        assert factor.dtype == torch.bfloat16
        assert factor.equal(exact[name].bfloat16())


def test_bfloat16_parameters_have_float32_factors():
    metric = Metric(mlp(torch.bfloat16), structure="kfac")
    assert {f.dtype for f in metric.named_factors().values()} == {torch.float32}
    grads = random_like(trainable(mlp(torch.bfloat16)))
    assert {part.dtype for part in perturbed(metric).apply(grads).values()} == {torch.bfloat16}


@pytest.mark.parametrize("kind", KINDS)
def test_a_callers_autocast_does_not_reach_the_metric(kind):
    model = mlp(torch.float32)
    metric = perturbed(Metric(model, structure=kind))
    grads = random_like(trainable(model))
    plain = metric.apply(grads)
    with torch.autocast("cpu", torch.bfloat16):
        inside = metric.apply(grads)
    assert all(part.equal(inside[name]) for name, part in plain.items())


# -- moving average and bounds -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ema", [0.0, 0.9, 1.0])
def test_the_moving_average_is_factor_by_factor(kind, ema):
    metric = perturbed(Metric(mlp(), structure=kind), seed=1)
    old = metric.factors()
    new = perturbed(Metric(mlp(), structure=kind), seed=2).factors()
    blended = metric.constrain(metric.average(new, ema))
    for group, kept, learned in zip(blended, old, new, strict=True):
        for name, factor in group.items():
            expected = ema * kept[name] + (1 - ema) * learned[name]
            torch.testing.assert_close(factor, expected, rtol=1e-14, atol=1e-14)
    assert metric.factors() is old


@pytest.mark.parametrize("kind", KINDS)
def test_bounds_hold_after_the_moving_average(kind):
    parameters = trainable(mlp())
    metric = Metric(mlp(), structure=kind, bounds=(0.8, 1.1))
    metric.assign(metric.constrain(metric.average(perturbed(Metric(mlp(), structure=kind), spread=2.0).factors(), 0.5)))
    spectrum = torch.linalg.eigvalsh(dense_metric(metric, parameters))
    assert spectrum.min() >= 0.8 - 1e-9
    assert spectrum.max() <= 1.1 + 1e-9


@pytest.mark.parametrize("bounds", [(0.0, 2.0), (1.5, 2.0), (0.1, 0.9), (-1.0, 2.0), (2.0, 0.5)])
def test_bounds_must_hold_the_identity(bounds):
    with pytest.raises(ValueError, match="bounds: need 0 < u_min <= 1 <= u_max"):
        Metric(mlp(), bounds=bounds)


@pytest.mark.parametrize("bounds", [0.5, (0.5,), (0.5, 1, 2)])
def test_bounds_are_a_pair(bounds):
    with pytest.raises(TypeError, match="bounds: expected a pair"):
        Metric(mlp(), bounds=bounds)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("argument", ["dtype", "apply_dtype"])
def test_factors_that_no_gradient_fits_in_are_refused(argument, dtype):
    with pytest.raises(ValueError, match=f"{argument}: expected bfloat16, float32 or float64, .*, got {dtype}"):
        Metric(mlp(), **{argument: dtype})


# -- memory and state --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_memory_announced_is_memory_used(kind):
    metric = Metric(vit(fused=True), structure=kind)
    announced = metric.memory()
    assert announced["allocated"] == 0
    assert announced["total"] == metric.stored() * 8 == sum(v for k, v in announced.items() if k in STRUCTURES)
    perturbed(metric)
    assert metric.memory()["allocated"] == announced["total"]


@pytest.mark.parametrize("kind", [*KINDS, {"0.*": "identity", "*": "e-kfac"}], ids=str)
def test_state_round_trip(kind):
    first, second = perturbed(Metric(mlp(), structure=kind)), perturbed(Metric(mlp(), structure=kind), seed=9)
    second.load_state_dict(first.state_dict())
    assert all(f.equal(second.named_factors()[name]) for name, f in first.named_factors().items())
    grads = random_like(trainable(mlp()))
    assert all(part.equal(second.apply(grads)[name]) for name, part in first.apply(grads).items())


@pytest.mark.parametrize("kind", sorted(STRUCTURES))
def test_the_state_of_a_layer_of_two_dtypes(kind):
    """Its weight and its bias cannot share a number, nor a name."""
    model = nn.Linear(4, 3)
    model.bias = nn.Parameter(model.bias.detach().double())
    first, second = perturbed(Metric(model, structure=kind)), Metric(model, structure=kind)
    second.load_state_dict(first.state_dict())
    grads = random_like(trainable(model))
    assert all(part.equal(second.apply(grads)[name]) for name, part in first.apply(grads).items())


def test_a_saved_state_does_not_change_with_the_metric():
    metric = perturbed(Metric(mlp(), structure="kfac"))
    state = metric.state_dict()
    before = {name: factor.clone() for name, factor in state["factors"].items()}
    other = Metric(mlp(), structure="kfac")
    other.load_state_dict(state)
    metric.assign(metric.constrain(metric.average(perturbed(Metric(mlp(), structure="kfac"), seed=3).factors(), 0.5)))
    other.assign(other.constrain(other.average(metric.factors(), 0.5)))
    assert all(factor.equal(before[name]) for name, factor in state["factors"].items())


def test_the_state_does_not_depend_on_the_stacking():
    """Names refer to single blocks, so a state can be loaded where the stack has other members."""
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    metric = perturbed(Metric(nn.Sequential(a, b), structure="kfac"))
    state = metric.state_dict()
    assert state["factors"]["1.weight/in"].equal(metric.factors()[0]["in"][1])


def test_an_unlearned_state_makes_a_learned_metric_forget():
    metric = perturbed(Metric(mlp(), structure="kfac"))
    metric.load_state_dict(Metric(mlp(), structure="kfac").state_dict())
    assert not metric.learned


def test_a_state_of_another_structure_or_shape_is_refused():
    metric = perturbed(Metric(mlp(), structure="kfac"))
    before = {name: factor.clone() for name, factor in metric.named_factors().items()}
    with pytest.raises(
        ValueError, match=r"state_dict: the saved metric differs in the structure of 0.weight, 2.weight"
    ):
        metric.load_state_dict(perturbed(Metric(mlp(), structure="e-kfac")).state_dict())
    state = metric.state_dict()
    state["factors"] = state["factors"] | {"0.weight/in": torch.zeros(2, 2)}
    with pytest.raises(ValueError, match=r"factor '0.weight/in' is of shape \(2, 2\), expected shape \(4, 4\)"):
        metric.load_state_dict(state)
    state["factors"].pop("0.weight/in")
    with pytest.raises(ValueError, match=r"factor '0.weight/in' is missing"):
        metric.load_state_dict(state)
    assert all(factor.equal(before[name]) for name, factor in metric.named_factors().items())


def test_frozen_parameters_have_no_block():
    model = mlp()
    model[0].weight.requires_grad_(False)
    assert [b.name for b in Metric(model).blocks] == ["0.bias", "2.weight", "2.bias"]
    assert unflat(torch.zeros(6), {"0.bias": model[0].bias})["0.bias"].shape == (6,)


def test_a_diagonal_that_was_replaced_is_not_applied_again():
    model = torch.nn.Linear(3, 2)
    metric = Metric(model)
    ones = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    for number in (2.0, 3.0):
        metric.assign([{"diagonal": torch.full((8,), number)}])
        assert all(Ug.eq(number).all() for Ug in metric.apply(ones).values())


@pytest.mark.parametrize("structure", ["scalar", "diagonal", "kfac", "e-kfac", "e-kfac-one-sided", "e-kfac-channels"])
def test_before_it_is_learned_a_metric_follows_its_model(structure):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 5))
    metric, there = Metric(model, structure=structure), Metric(model.to("meta"), structure=structure)
    metric.follow(trainable(model))
    assert metric.blocks == there.blocks
    assert [group.blocks for group in metric.groups] == [group.blocks for group in there.groups]
    assert all(factor.is_meta for own in metric.factors() for factor in own.values())


def test_a_learned_metric_does_not_follow():
    model = mlp()
    metric = perturbed(Metric(model, structure="kfac"))
    metric.follow(trainable(model))
    with pytest.raises(RuntimeError, match=r"'0.weight' moved from cpu.* to meta.*; make the geometry after moving"):
        metric.follow(trainable(model.to("meta")))


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_does_not_depend_on_the_memory_order(kind):
    """A model that is made channels last goes on with the metric of one that is not, and back."""
    plain, last = convolutions().to(memory_format=torch.contiguous_format), convolutions()
    first, second = perturbed(Metric(plain, structure=kind)), Metric(last, structure=kind)
    grads = random_like(trainable(plain))
    second.load_state_dict(first.state_dict())
    assert relative_error(flat(second.apply(grads)), flat(first.apply(grads))) < 1e-13
    again = Metric(plain, structure=kind)
    again.load_state_dict(second.state_dict())
    assert all(part.equal(first.named_factors()[name]) for name, part in again.named_factors().items())


@pytest.mark.parametrize("kind", sorted(STRUCTURES))
def test_a_weight_without_entries(kind):
    class Empty(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(0, 3), nn.Linear(4, 3)

        def forward(self, x):
            return self.b(x) + self.a(x[:, :0])

    geometry = flat_geometry(Empty(), F.cross_entropy, structure=kind, steps=3)
    assert geometry.refresh((torch.randn(6, 4), torch.randint(3, (6,)))).accepted

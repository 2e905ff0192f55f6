"""A refresh replayed as CUDA graphs is the refresh. Needs a GPU, but for what is refused without one."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import llqr
from geometries import flat_geometry
from references import relative_error
from traps.training import closure_of

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 5),
    )


def batches(device, count=3):
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(16, 3, 8, 8, generator=generator).to(device),
            torch.randint(5, (16,), generator=generator).to(device),
        )
        for _ in range(count)
    ]


@needs_cuda
@pytest.mark.parametrize("engine", ["forward", "linearised", "compiled"])
@pytest.mark.parametrize("divergence", ["ngd", "newton"])
@pytest.mark.parametrize("structure", ["scalar", "diagonal", "kfac", "e-kfac", "diag-kfac", "e-kfac-psd"])
def test_captured_equals_eager(structure, divergence, engine):
    if engine == "compiled" and structure not in ("diagonal", "e-kfac"):
        pytest.skip("what is compiled knows nothing of the structure")
    model = network().cuda().double()
    settings = {"structure": structure, "divergence": divergence, "ema": 0.5}
    ways = [{"engine": "double-backward"}, {"engine": engine, "capture": True}]
    if engine == "compiled":
        ways[1] |= {"engine": "linearised", "compile": True}
    made = [flat_geometry(model, F.cross_entropy, **settings, **way) for way in ways]
    for x, y in batches("cuda"):
        eager, captured = (geometry.refresh((x.double(), y)) for geometry in made)
        assert captured.accepted
        assert captured.objective_before == pytest.approx(eager.objective_before, rel=1e-10)
        assert captured.objective_after == pytest.approx(eager.objective_after, rel=1e-10)
        with torch.no_grad():  # the graphs read the parameters in place
            for parameter in model.parameters():
                parameter.add_(0.01)
    factors = [geometry.metric.named_factors() for geometry in made]
    assert max(relative_error(factors[1][name], factors[0][name]) for name in factors[0]) < 1e-10


@needs_cuda
@pytest.mark.parametrize("solver", ["heavy-ball", "adam"])
@pytest.mark.parametrize("structure", ["diagonal", "kfac", "e-kfac"])
def test_captured_with_few_products_equals_eager(structure, solver):
    model = network().cuda().double()
    settings = {"structure": structure, "solver": solver, "engine": "forward", "steps": 20, "product_every": 4}
    made = [flat_geometry(model, F.cross_entropy, capture=capture, **settings) for capture in (False, True)]
    for x, y in batches("cuda"):
        eager, captured = (geometry.refresh((x.double(), y)) for geometry in made)
        assert captured.accepted
        assert captured.objective_after == pytest.approx(eager.objective_after, rel=1e-10)
    factors = [geometry.metric.named_factors() for geometry in made]
    assert max(relative_error(factors[1][name], factors[0][name]) for name in factors[0]) < 1e-10


@needs_cuda
def test_a_new_shape_or_learning_rate_is_captured_anew():
    model = network().cuda()
    settings = {"lr": lambda step: 1e-3 / (1 + step), "steps": 5}
    eager, captured = (flat_geometry(model, F.cross_entropy, capture=c, **settings) for c in (False, True))
    for rows in (16, 16, 8):
        x, y = batches("cuda", 1)[0]
        for geometry in (eager, captured):
            geometry.refresh((x[:rows], y[:rows]))
            geometry.advance()
    pairs = zip(eager.metric.named_factors().values(), captured.metric.named_factors().values(), strict=True)
    assert max(relative_error(b, a) for a, b in pairs) < 1e-5


@needs_cuda
def test_a_refresh_that_fails_keeps_the_metric_and_the_next_is_right():
    model = network().cuda()
    geometry = flat_geometry(model, F.cross_entropy, steps=5, capture=True)
    good, other, last = batches("cuda")
    geometry.refresh(good)
    before = {name: factor.clone() for name, factor in geometry.metric.named_factors().items()}
    with pytest.warns(llqr.RefreshWarning):
        assert not geometry.refresh((other[0] * float("nan"), other[1])).accepted
    assert all(torch.equal(factor, before[name]) for name, factor in geometry.metric.named_factors().items())
    assert geometry.refresh(last).accepted


@needs_cuda
@pytest.mark.parametrize("method", ["sam", "llqr+sam", "llqr+fsam"])
def test_a_step_never_waits_for_the_device(method):
    model = network().cuda()
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    geometry = flat_geometry(model, F.cross_entropy, steps=3) if method.startswith("llqr") else None
    opt = llqr.build(method, base, geometry=geometry, rho=0.1)
    x, y = batches("cuda", 1)[0]

    def closure():
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(2):
        opt.step(closure, batch=(x, y))
    torch.cuda.set_sync_debug_mode("error")
    try:
        opt.step(closure)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def transported(geometry, seed):
    """`U g` of random gradients, in memory of its own."""
    generator = torch.Generator().manual_seed(seed)
    parameters = list(geometry.parameters.values())
    grads = [torch.randn(p.shape, generator=generator).to(p) for p in parameters]
    return [moved.clone() for moved in geometry.transport(parameters, grads)]


@needs_cuda
@pytest.mark.parametrize("apply_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("structure", ["diagonal", "kfac", "e-kfac", {"5.*": "identity", "*": "e-kfac-psd"}], ids=str)
def test_a_recorded_action_is_the_action(structure, apply_dtype):
    """Bit by bit, for one gradient after another, and for every metric that is learned or loaded."""
    model = network().cuda().to(memory_format=torch.channels_last)
    settings = {"structure": structure, "apply_dtype": apply_dtype, "steps": 5, "ema": 0.0}
    plain, recorded = (flat_geometry(model, F.cross_entropy, capture=c, **settings) for c in (False, True))
    for batch in batches("cuda"):
        recorded.refresh(batch)
        plain.load_state_dict(recorded.state_dict())
        for seed in range(3):
            pairs = list(zip(transported(plain, seed), transported(recorded, seed), strict=True))
            assert all(ours.equal(theirs) and ours.stride() == theirs.stride() for ours, theirs in pairs)
    before = transported(recorded, 0)
    identity = flat_geometry(model, F.cross_entropy, **settings)
    identity.metric.assign(identity.metric.factors())
    recorded.load_state_dict(identity.state_dict())
    assert not all(map(torch.equal, transported(recorded, 0), before))


@needs_cuda
def test_a_recorded_action_leaves_out_what_has_no_gradient():
    model = network().cuda()
    geometry = flat_geometry(model, F.cross_entropy, structure="kfac", capture=True, steps=5)
    geometry.refresh(batches("cuda", 1)[0])
    parameters = list(model.parameters())
    grads = [torch.randn_like(p) for p in parameters]
    every = [moved.clone() for moved in geometry.transport(parameters, grads)]
    some = geometry.transport(parameters[2:], grads[2:])
    assert max(relative_error(a, b) for a, b in zip(some, every[2:], strict=True)) < 1e-6


@needs_cuda
def test_steps_with_a_recorded_action_are_the_steps():
    ends = []
    for capture in (False, True):
        model = network().cuda().double()
        geometry = flat_geometry(model, F.cross_entropy, structure="kfac", steps=5, every=3, capture=capture)
        opt = llqr.LLQRSAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), geometry, rho=0.05)
        for x, y in batches("cuda", 7):
            batch = x.double(), y
            opt.step(closure_of(opt, model, batch), batch=batch)
        ends.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach())
    assert relative_error(ends[1], ends[0]) < 1e-10


@needs_cuda
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_captured_geometry_can_be_copied(copied):
    model = network().cuda().double()
    geometry = flat_geometry(model, F.cross_entropy, structure="kfac", capture=True, steps=5)
    first, second = ((x.double(), y) for x, y in batches("cuda", 2))
    geometry.refresh(first)
    transported(geometry, 0)
    _, twin = copied((model, geometry))
    for one in (geometry, twin):
        assert one.refresh(second).accepted
    pairs = zip(transported(geometry, 1), transported(twin, 1), strict=True)
    assert max(relative_error(a, b) for a, b in pairs) < 1e-10


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "need every parameter on a CUDA device"),
        ({"micro_batch": 4}, "not with micro_batch"),
    ],
    ids=str,
)
def test_what_cannot_be_captured_is_refused(settings, message):
    with pytest.raises(ValueError, match=f"capture: .*{message}"):
        flat_geometry(network(), F.cross_entropy, capture=True, **settings)

"""The methods by name, as the paper's tables spell them."""

import numpy as np
import pytest
import torch
from torch import nn

import llqr
from traps.training import assert_same_bits, batches, cross_entropy, mlp, quick_geometry, sgd, train, weights

#: Every method name in the paper's tables, with what it must be: probe, whether a metric is learned, and transport.
PAPER = {
    "sgdm": (None, False, True),
    "adam": (None, False, True),
    "adamw": (None, False, True),
    "sam": ("sam", False, True),
    "fishersam": ("fishersam", False, True),
    "fsam": ("fsam", False, True),
    "llqr-ngd": (None, True, True),
    "llqr-newton": (None, True, True),
    "llqr-ngd+sam": ("sam", True, True),
    "llqr-newton+sam": ("sam", True, True),
    "llqr-ngd+fsam": ("fsam", True, True),
    "llqr-newton+fsam": ("fsam", True, True),
    "llqr-ngd-probe-only+sam": ("sam", True, False),
}


def settings_for(name, model):
    return geometry_for(name, model) | ({"rho": 0.05} if "sam" in name else {})


def geometry_for(name: str, model: nn.Module) -> dict[str, llqr.Geometry]:
    if "llqr" not in name:
        return {}
    return {"geometry": quick_geometry(model, divergence="newton" if "newton" in name else "ngd")}


@pytest.mark.parametrize("name", PAPER)
def test_every_name_of_the_tables_builds_and_trains(name):
    model, data = mlp(), batches(3)
    opt = llqr.build(name, sgd(model), **settings_for(name, model))
    probe, learned, transport = PAPER[name]
    assert (opt.probe.name if opt.probe else None) == probe
    assert (opt.geometry is not None) == learned
    assert opt.transport == transport
    before = model[0].weight.detach().clone()
    train(opt, model, data)
    assert not model[0].weight.equal(before)
    assert not learned or opt.geometry.metric.learned


@pytest.mark.parametrize("name", llqr.method_names())
def test_every_listed_name_builds(name):
    model = mlp()
    assert isinstance(llqr.build(name, sgd(model), **settings_for(name, model)), llqr.Optimizer)


def test_names_are_not_case_sensitive_and_settings_pass_through():
    model = mlp()
    opt = llqr.build("LLQR-NGD+FSAM", sgd(model), rho=0.3, lam=0.6, norm="euclidean", **geometry_for("llqr-ngd", model))
    assert (opt.probe.rho, opt.probe.lam, opt.probe.norm) == (0.3, 0.6, "euclidean")
    assert llqr.build("asam", sgd(model), rho=0.5, eta=0.5, start_after=7).probe.start_after == 7


def test_transport_may_be_said_beside_a_name():
    model = mlp()
    opt = llqr.build("llqr+sam", sgd(model), geometry=quick_geometry(model), rho=0.05, transport=False)
    assert not opt.transport


@pytest.mark.parametrize("name", ["samm", "", "llqr-foo+sam", "llqr+adam", "sam+llqr", "llqr+", "llqr-ngd-newton+sam"])
def test_an_unknown_name_lists_the_known_ones(name):
    with pytest.raises(ValueError, match="name: unknown method") as error:
        llqr.build(name, sgd(mlp()))
    assert all(known in str(error.value) for known in llqr.method_names())


@pytest.mark.parametrize("name", [name for name in llqr.method_names() if "llqr" in name])
def test_a_missing_geometry(name):
    with pytest.raises(ValueError, match=r"geometry: .* needs one"):
        llqr.build(name, sgd(mlp()))


@pytest.mark.parametrize("name", ["sam", "asam", "fishersam", "fsam"])
def test_a_superfluous_geometry_is_refused_with_the_name_that_takes_one(name):
    model = mlp()
    with pytest.raises(ValueError, match=rf"did you mean 'llqr\+{name}'"):
        llqr.build(name, sgd(model), geometry=quick_geometry(model))


@pytest.mark.parametrize("name", ["sgdm", "adam", "adamw"])
def test_a_superfluous_geometry_of_a_base_optimizer(name):
    model = mlp()
    with pytest.raises(ValueError, match="did you mean 'llqr'"):
        llqr.build(name, sgd(model), geometry=quick_geometry(model))


def test_a_divergence_that_contradicts_the_name():
    model = mlp()
    with pytest.raises(ValueError, match="wants the divergence 'newton', got 'ngd'"):
        llqr.build("llqr-newton+sam", sgd(model), geometry=quick_geometry(model, divergence="ngd"))
    llqr.build("llqr+sam", sgd(model), rho=0.05, geometry=quick_geometry(model, divergence="newton"))


def test_the_classes_are_the_methods_of_the_same_name():
    """A class and `build` must make the same optimizer: both take the same steps."""
    data = batches(3)
    pairs = {
        "sam": lambda m: llqr.SAM(sgd(m), rho=0.2),
        "asam": lambda m: llqr.ASAM(sgd(m), rho=0.2),
        "fishersam": lambda m: llqr.FisherSAM(sgd(m), rho=0.2),
        "fsam": lambda m: llqr.FriendlySAM(sgd(m), rho=0.2),
        "llqr+sam": lambda m: llqr.LLQRSAM(sgd(m), quick_geometry(m), rho=0.2),
        "llqr-probe-only+sam": lambda m: llqr.LLQRSAM(sgd(m), quick_geometry(m), rho=0.2, transport=False),
        "llqr+fsam": lambda m: llqr.FriendlySAM(sgd(m), rho=0.2, geometry=quick_geometry(m)),
    }
    ends = {}
    for name, make in pairs.items():
        by_class, by_name = mlp(), mlp()
        train(make(by_class), by_class, data)
        train(llqr.build(name, sgd(by_name), rho=0.2, **geometry_for(name, by_name)), by_name, data)
        assert all(a.equal(b) for a, b in zip(by_class.parameters(), by_name.parameters(), strict=True))
        ends[name] = by_class[0].weight.detach()
    names = list(ends)
    distinct = [(a, b) for i, a in enumerate(names) for b in names[:i] if ends[a].equal(ends[b])]
    assert not distinct, "two methods took the same steps"


class SignProbe(llqr.SAMProbe):
    """`eps = rho sign(g) / |sign(g)|`."""

    name = "sign-sam"

    def filtered(self, point):
        return [gradient.sign() for gradient in point.grads]


def test_a_new_probe_is_one_class_and_one_line(monkeypatch):
    monkeypatch.setitem(llqr.PROBES, SignProbe.name, SignProbe)
    assert {"sign-sam", "llqr+sign-sam", "llqr-probe-only+sign-sam"} <= set(llqr.method_names())
    model, data = mlp(), batches(2)
    opt = llqr.build("llqr-ngd+sign-sam", sgd(model), rho=0.3, model=model, **geometry_for("llqr-ngd", model))
    assert (type(opt.probe), opt.probe.rho, opt.transport) == (SignProbe, 0.3, True)
    by_name, by_class = mlp(), mlp()
    train(llqr.build("sign-sam", sgd(by_name), rho=0.3), by_name, data)
    train(llqr.Optimizer(sgd(by_class), SignProbe(rho=0.3)), by_class, data)
    train(opt, model, data)
    assert all(a.equal(b) for a, b in zip(by_name.parameters(), by_class.parameters(), strict=True))
    assert not model[0].weight.equal(by_name[0].weight)


@pytest.mark.parametrize(("name", "setting"), [("sam", "lam"), ("fsam", "eta"), ("sgdm", "rho"), ("llqr", "rho")])
def test_a_setting_of_another_method_is_refused(name, setting):
    model = mlp()
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{setting}'"):
        llqr.build(name, sgd(model), **geometry_for(name, model), **{setting: 0.1})


def test_probe_only_does_not_change_the_update():
    """LLQR^Delta: the metric decides where the gradient is taken, and the base gets that gradient unchanged."""
    model, (batch,) = mlp(torch.float64), batches(1, dtype=torch.float64)
    parameters = list(model.parameters())
    u = [0.5 + torch.rand_like(p) for p in parameters]
    fixed = llqr.FixedGeometry([(p, lambda g, u=u_p: u * g) for p, u_p in zip(parameters, u, strict=True)])
    opt = llqr.LLQRSAM(torch.optim.SGD(parameters, lr=1.0), fixed, rho=0.4, transport=False)
    start = [p.detach().clone() for p in parameters]
    g = torch.autograd.grad(cross_entropy(model(batch[0]), batch[1]), parameters)
    norm = torch.sqrt(sum((a * b * a).sum() for a, b in zip(g, u, strict=True)))
    there = {
        name: (w + 0.4 * a * b / norm).requires_grad_()
        for (name, _), w, a, b in zip(model.named_parameters(), start, g, u, strict=True)
    }
    loss = cross_entropy(torch.func.functional_call(model, there, batch[0]), batch[1])
    expected = [w - a for w, a in zip(start, torch.autograd.grad(loss, list(there.values())), strict=True)]
    train(opt, model, [batch])
    torch.testing.assert_close([p.detach() for p in parameters], expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda base: llqr.SAM(base, rho=-0.1), "rho"),
        (lambda base: llqr.SAM(base, rho="0.1"), "rho"),
        (lambda base: llqr.SAM(base, rho=0.05, norm="l7"), "norm"),
        (lambda base: llqr.SAM(base, rho=0.05, start_after=-1), "start_after"),
        (lambda base: llqr.ASAM(base, rho=0.5, eta=-1.0), "eta"),
        (lambda base: llqr.FisherSAM(base, rho=0.1, eta=0.0), "eta"),
        (lambda base: llqr.FriendlySAM(base, rho=0.05, lam=1.5), "lam"),
    ],
)
def test_bad_settings_are_named(make, argument):
    with pytest.raises(ValueError, match=f"^{argument}: "):
        make(sgd(mlp()))


def parameters():
    return [torch.nn.Parameter(torch.ones(2))]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda base: llqr.SAM(llqr.SAM(base, rho=0.05), rho=0.05), "base: SAM is a wrapper already"),
        (lambda base: llqr.Optimizer(base, 0.05), "probe: expected a llqr.SAMProbe"),
        (lambda base: llqr.Optimizer(base, llqr.SAMProbe), "probe: expected a llqr.SAMProbe"),
        (lambda base: llqr.SAM(base, rho=0.05, model="resnet"), "model: expected an nn.Module, got str"),
        (lambda base: llqr.SAM(base, rho=0.05, no_sync=True), "no_sync: expected a function"),
        (lambda base: llqr.SAM(base, rho=0.05, transport="no"), "transport: expected True or False"),
        (lambda base: llqr.SAM(base, rho=0.05, same_dropout="no"), "same_dropout: expected True or False"),
        (lambda base: llqr.LLQR(base, None), "geometry: expected a llqr.Geometry, got None"),
        (lambda base: llqr.LLQRSAM(base, None, rho=0.05), "geometry: expected a llqr.Geometry, got None"),
        (lambda base: llqr.build(None, base), "name: expected one of"),
        (lambda base: llqr.FriendlySAM(base, rho=0.05, lam=lambda step: 0.9), "lam: expected a number"),
        (lambda base: llqr.ASAM(base, rho=0.5, eta=float("inf")), "eta: expected a number"),
        (lambda base: llqr.SAM(base, rho=0.05, start_after=lambda step: 3), "start_after: expected a number"),
    ],
)
def test_wrong_arguments_are_named(wrong, says):
    with pytest.raises((TypeError, ValueError), match=f"^{says}"):
        wrong(torch.optim.SGD(parameters(), lr=0.1))


@pytest.mark.parametrize("number", [np.float32, np.array, torch.tensor], ids=["numpy", "array", "tensor"])
def test_scalars_of_numpy_and_torch_are_numbers(number):
    def trained(of):
        model = mlp()
        inner = llqr.Inner(steps=2, lr=of(0.5), curvature_scale=of(0.25))
        geometry = llqr.Geometry(
            model, cross_entropy, structure="diagonal", every=of(2), ema=of(0.5), damping=of(0.5), inner=inner
        )
        first, *others = model.parameters()
        base = torch.optim.SGD([{"params": [first], "rho": of(0.5)}, {"params": others}], lr=0.1)
        opt = llqr.FriendlySAM(base, rho=of(0.25), lam=of(0.5), start_after=of(1), geometry=geometry)
        train(opt, model, batches(4))
        assert opt.geometry.refreshes == 2
        return weights(model)

    assert_same_bits(trained(number), trained(float))

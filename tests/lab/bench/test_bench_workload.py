"""Networks by name, and passes and steps that compute what they claim to."""

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy

import llqr
from llqr.lab.bench.refresh import RefreshSettings, geometry_of, learn
from llqr.lab.bench.workload import METHODS, Network, step_of
from llqr.lab.config.strict import ConfigurationError
from references import flat, trainable
from tiny_workloads import CNN, MLP, VIT, workload


def learned(work, structure, steps):
    runtime = llqr.Runtime(engine="forward")
    settings = RefreshSettings(structure, runtime=runtime, inner=llqr.Inner(steps=steps))
    return learn(geometry_of(work, settings), work)


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("vit-b", "vit-b", {}),
        ("mlp:hidden=[8]", "mlp", {"hidden": [8]}),
        ("resnet18:width=16,classes=10", "resnet18", {"width": 16, "classes": 10}),
        ("vgg16-bn:dropout=0.5", "vgg16-bn", {"dropout": 0.5}),
    ],
)
def test_a_network_is_named_with_its_options(text, name, options):
    assert Network.parse(text) == Network(name, options)


@pytest.mark.parametrize(("text", "parameters"), [("vit-b", 86567656), ("vit-l", 304326632), ("resnet18", 11220132)])
def test_networks_have_the_papers_size(text, parameters):
    with torch.device("meta"):
        model = Network.parse(text).build()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("vit-x", "--model must be one of"),
        ("vit-b:depth", "'depth' must be written key=value"),
        ("resnet18:dim=3", "--model resnet18:dim=3: "),
        ("vit-b:image_size=30", "patch must divide image_size"),
    ],
)
def test_unknown_networks_and_options_are_named(text, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        Network.parse(text).build()


def test_a_workload_is_the_same_every_time():
    first, second = workload(VIT), workload(VIT)
    assert flat(trainable(first.model)).equal(flat(trainable(second.model)))
    assert first.batch[0].equal(second.batch[0])
    assert first.parameters == flat(trainable(first.model)).numel()


def test_a_closure_leaves_the_gradient_of_the_loss():
    work = workload()
    images, labels = work.batch
    loss = cross_entropy(work.model(images), labels)
    expected = torch.autograd.grad(loss, list(work.model.parameters()))
    for _ in range(2):  # the gradients of an earlier call are gone
        assert float(work.closure()) == pytest.approx(float(loss.detach()))
        torch.testing.assert_close([p.grad for p in work.model.parameters()], list(expected))


def test_every_method_moves_the_weights_of_the_one_network():
    work = workload()
    geometry = learned(work, "kfac", steps=1)
    for method in METHODS:
        before = flat(trainable(work.model)).clone()
        step_of(method, work, geometry)()
        assert not before.equal(flat(trainable(work.model))), method


@pytest.mark.parametrize("method", ["LLQR", "LLQR+SAM"])
def test_a_step_with_a_metric_is_that_of_the_library_and_refreshes_nothing(method):
    work = workload(MLP)
    geometry = learned(work, "diagonal", steps=3)
    other = copy.deepcopy(work.model)
    base = torch.optim.SGD(other.parameters(), lr=1e-4, momentum=0.9, weight_decay=5e-4)
    fixed = llqr.Geometry(other, cross_entropy, structure="diagonal", every=10**9)
    fixed.refresh(work.batch)
    fixed.metric.assign(geometry.metric.factors())
    images, labels = work.batch
    optimizer = llqr.LLQR(base, fixed) if method == "LLQR" else llqr.LLQRSAM(base, fixed, rho=0.05)

    def closure():
        optimizer.zero_grad()
        loss = cross_entropy(other(images), labels)
        loss.backward()
        return loss

    step = step_of(method, work, geometry)
    for _ in range(3):
        step()
        optimizer.step(closure)
    torch.testing.assert_close(trainable(work.model), trainable(other))
    assert geometry.refreshes == 1


def test_after_a_rejected_refresh_the_metric_still_acts():
    work = workload(CNN)
    with torch.no_grad():
        next(work.model.parameters()).fill_(float("nan"))
    with pytest.warns(llqr.RefreshWarning):
        geometry = learned(work, "e-kfac", steps=1)
    assert geometry.metric.learned
    assert not geometry.due

"""How many kernels the inner loop launches: matrix products a step, and none that are counted in layers."""

import pytest
import torch
from torch import nn

from launches import Launches
from llqr import Inner, Metric
from llqr.inner import Objective
from quadratics import solver_for

PRODUCTS = {"bmm", "baddbmm", "baddbmm_"}


class Unit:
    """`H = I` and a random gradient."""

    def __init__(self, model):
        self.gradient = {name: torch.randn_like(p) for name, p in model.named_parameters()}
        self.loss = torch.zeros(())

    def product(self, v):
        return dict(v)


def network(depth, width=64):
    layers = [(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()) for _ in range(depth)]
    return nn.Sequential(*(layer for three in layers for layer in three), nn.Linear(width, 10))


def of_one_step(model, kind):
    """The operators of an inner step without those of the network and of the optimizer, which has multi-tensor ones."""
    metric, unit = Metric(model, structure=kind), Unit(model)
    with torch.no_grad():
        objective, descent = Objective(metric, unit), solver_for(metric, Inner())
        descent._update = lambda slopes: None
        descent.advance(objective, product=True)
        with Launches() as operators:
            descent.advance(objective, product=True)
    return metric, operators


@pytest.mark.parametrize(("kind", "products"), [("kfac", 5), ("e-kfac", 11), ("e-kfac-psd", 11), ("kfac-psd", 9)])
def test_products_of_a_step(kind, products):
    """`U g` and the pull-back together, for every shape of matrix."""
    metric, operators = of_one_step(network(3), kind)
    stacks = sum(group.name == kind for group in metric.groups)
    assert stacks == 2
    assert sum(operators.by_name.get(name, 0) for name in PRODUCTS) == products * stacks


@pytest.mark.parametrize("kind", ["scalar", "diagonal", "kfac", "e-kfac", "diag-kfac"])
def test_a_deeper_network_launches_no_more(kind):
    totals = {depth: of_one_step(network(depth), kind)[1].total for depth in (2, 9)}
    assert totals[2] == totals[9]


@pytest.mark.parametrize(("kind", "most"), [("scalar", 19), ("diagonal", 14)])
def test_vectors_take_a_few_kernels(kind, most):
    """Whatever the number of layers; 97 and 61 on a ResNet-18 when layers were scaled one by one."""
    assert of_one_step(network(20), kind)[1].total <= most


def test_counting_is_not_blind():
    vectors = [torch.ones(3), torch.ones(5)]
    with Launches() as operators:
        torch._foreach_mul(vectors, vectors)
        torch._foreach_mul(vectors, [torch.ones(()), torch.ones(())])
        vectors[0].view(3, 1).t().add_(1)
    assert {name: operators.by_name[name] for name in ("_foreach_mul", "add_")} == {"_foreach_mul": 3, "add_": 1}

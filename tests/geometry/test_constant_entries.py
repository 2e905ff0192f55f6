"""Entries that a hook or a parametrization keeps constant stay where they are, whatever the structure of `U`."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import llqr

FROZEN = 3


def trained(first: nn.Module, structure: str, method: str, **settings: float) -> nn.Module:
    """Three steps with a metric that is far from the identity."""
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(8, 3))
    x, y = torch.randn(32, 12), torch.randint(3, (32,))
    geometry = llqr.Geometry(model, F.cross_entropy, structure=structure, every=1, ema=0.0, inner=llqr.Inner(lr=0.05))
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    opt = llqr.build(method, base, geometry=geometry, **settings)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(3):
        opt.step(closure, batch=(x, y))
    return first


@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.parametrize("structure", llqr.STRUCTURES)
def test_rows_that_a_hook_freezes(structure, accumulated):
    layer, mask = nn.Linear(12, 8), torch.ones(8, 1)
    mask[:FROZEN] = 0
    if accumulated:

        def freeze(weight):
            weight.grad.mul_(mask)

        layer.weight.register_post_accumulate_grad_hook(freeze)
    else:
        layer.weight.register_hook(lambda g: g * mask)
    before = layer.weight.detach().clone()
    trained(layer, structure, "llqr+sam", rho=0.1)
    assert layer.weight[:FROZEN].equal(before[:FROZEN])
    assert not layer.weight[FROZEN:].isclose(before[FROZEN:], rtol=0).any()


@pytest.mark.parametrize("method", ["llqr", "llqr+sam", "llqr+asam", "llqr+fsam", "llqr-probe-only+sam"])
def test_an_orthogonal_weight_stays_orthogonal(method):
    """Torch keeps signs on the diagonal of the tensor that is trained; a metric must not move them."""
    radius = {"rho": 0.05} if "sam" in method else {}
    W = trained(parametrizations.orthogonal(nn.Linear(12, 8)), "e-kfac", method, **radius).weight
    assert torch.allclose(W @ W.mT, torch.eye(8), atol=1e-5)


def test_other_parameters_have_all_of_U():
    """A hook that only looks changes nothing, and without hooks zeros of a gradient are nothing special."""
    torch.manual_seed(0)
    layer = nn.Linear(12, 8)
    geometry = llqr.Geometry(layer, F.cross_entropy, structure="kfac", inner=llqr.Inner(lr=0.05))
    geometry.refresh((torch.randn(16, 12), torch.randint(8, (16,))))
    g = torch.randn(8, 12)
    (Ug,) = geometry.transport([layer.weight], [g])
    layer.weight.register_hook(lambda gradient: None)
    assert geometry.transport([layer.weight], [g])[0].equal(Ug)
    g[0] = 0
    restricted = geometry.transport([layer.weight], [g])[0]
    layer.weight._backward_hooks.clear()
    (free,) = geometry.transport([layer.weight], [g])
    assert free[0].any()
    assert not restricted[0].any()
    assert restricted[1:].equal(free[1:])

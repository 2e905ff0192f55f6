"""How many kernels an optimizer step launches besides its passes: a few, whatever the number of layers."""

import pytest
import torch
from torch import nn

import llqr
from geometries import flat_geometry
from launches import Launches
from llqr.probes.norms import NORMS
from traps.training import cross_entropy

#: Kernels of a step with the global norm: copies of weights and statistics (two dtypes), norm, displacement, base step.
MOST = {"sgdm": 4, "sam": 23, "fsam": 25, "asam": 27, "fishersam": 27, "llqr": 5, "llqr+sam": 24}


def network(depth, width=8, kernel=None):
    """The statistics of a BatchNorm have two dtypes: running means, and a count of batches.

    With a `kernel` its layers are convolutions in channels_last, of images of one pixel.
    """
    torch.manual_seed(0)
    norm = nn.BatchNorm1d if kernel is None else nn.BatchNorm2d
    between = [] if kernel is None else [nn.Flatten()]

    def linear():
        return nn.Linear(width, width) if kernel is None else nn.Conv2d(width, width, kernel, padding=kernel // 2)

    layers = [(linear(), norm(width), nn.ReLU()) for _ in range(depth)]
    model = nn.Sequential(*(layer for three in layers for layer in three), *between, nn.Linear(width, 3))
    return model.to(memory_format=torch.preserve_format if kernel is None else torch.channels_last)


def of_one_step(method, depth, kernel=None, **settings):
    """The operators of a step whose passes only assign precomputed gradients."""
    model = network(depth, kernel=kernel)
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    if method.startswith("llqr"):
        geometry = flat_geometry(model, cross_entropy, steps=1, engine="double-backward")
        geometry.refresh((torch.randn(6, 8, *([] if kernel is None else [1, 1])), torch.randint(3, (6,))))
        settings["geometry"] = geometry
    settings |= {"rho": 0.05} if "sam" in method else {}
    opt = llqr.build(method, base, model=model, **settings)
    grads, loss = [torch.randn_like(p) for p in model.parameters()], torch.ones(())

    def closure():
        for parameter, gradient in zip(model.parameters(), grads, strict=True):
            parameter.grad = gradient
        return loss

    opt.step(closure)  # makes the momenta
    with Launches() as operators:
        opt.step(closure)
    return operators


@pytest.mark.parametrize("method", MOST)
def test_a_few_kernels(method):
    assert 0 < of_one_step(method, 20).total <= MOST[method]


@pytest.mark.parametrize("kernel", [None, 3])
@pytest.mark.parametrize("norm", [norm for norm in NORMS if not norm.startswith("layer-")])
@pytest.mark.parametrize("method", [method for method in MOST if method not in ("sgdm", "llqr")])
def test_a_deeper_network_launches_no_more(method, norm, kernel):
    few, many = (of_one_step(method, depth, kernel, norm=norm) for depth in (2, 9))
    assert few.by_name == many.by_name


def test_lists_of_several_dtypes_would_be_copied_one_by_one():
    """What the grouping by dtype avoids, and that it would be counted."""
    tensors = [torch.ones(2), torch.ones(2, dtype=torch.int64)]
    with Launches() as operators:
        torch._foreach_copy_([torch.empty_like(tensor) for tensor in tensors], tensors)
    assert operators.by_name["_foreach_copy_"] == 2

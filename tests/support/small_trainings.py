"""What the loops of the frameworks and those written by hand train: a network, its data, and optimizers."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import llqr


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


def samples(count=8, rows=6):
    """So many micro-batches."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(rows, 4, generator=generator), torch.randint(3, (rows,), generator=generator))
        for _ in range(count)
    ]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def sam(model, **settings):
    return llqr.SAM(sgd(model), rho=0.1, model=model, **settings)


def llqr_sam(model):
    geometry = llqr.Geometry(model, cross_entropy, every=2, inner=llqr.Inner(steps=5, lr=0.05))
    return llqr.LLQRSAM(sgd(model), geometry, rho=0.1)


def plain_llqr(model):
    return llqr.LLQR(sgd(model), llqr.Geometry(model, cross_entropy, every=2, inner=llqr.Inner(steps=5, lr=0.05)))


def weights(model):
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


def assert_same(model, other, **tolerance):
    for ours, theirs in zip(weights(model), weights(other), strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance or {"rtol": 0, "atol": 0})

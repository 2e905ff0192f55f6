"""Measuring one solution reports how far it is, so that a bar for one run does not stand still."""

import torch
from torch import nn

from llqr.lab.analysis import sharpness, slices, solution


def test_every_product_and_loss_counts():
    torch.manual_seed(0)
    batch = torch.randn(16, 4), torch.randint(3, (16,))
    surface = sharpness.LossSurface(nn.Linear(4, 3), nn.functional.cross_entropy, batch)
    shares = []
    surface.on_work = solution._counting(shares.append, 1)
    found = sharpness.measure(surface)
    assert len(shares) == found.top.steps
    slices.along_random(surface, 0)
    assert len(shares) == found.top.steps + slices.POINTS
    assert shares == sorted(shares)
    assert 0 < shares[0] < shares[-1] <= 1

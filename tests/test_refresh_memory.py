"""How much a refresh holds at once beside weights and factors, in units of the weights' bytes."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import llqr
from live_bytes import LiveBytes

#: `g`, `U g`, the displaced weights of a difference, and its product; for a diagonal also what a step of its own holds.
MOST = {"scalar": 4.1, "diagonal": 7.1}


@pytest.mark.parametrize("engine", ["finite-differences", "one-sided-differences"])
@pytest.mark.parametrize("structure", MOST)
def test_a_refresh_holds_few_vectors(structure, engine):
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))
    batch = torch.randn(2, 256), torch.randint(256, (2,))  # so few that activations weigh nothing
    geometry = llqr.Geometry(model, F.cross_entropy, structure=structure, engine=engine, steps=3)
    geometry.refresh(batch)
    factors = [factor for group in geometry.metric.factors() for factor in group.values()]
    gc.collect()
    with LiveBytes([*model.parameters(), *batch, *factors]) as live:
        geometry.refresh(batch)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert 3 < live.peak / weights < MOST[structure]

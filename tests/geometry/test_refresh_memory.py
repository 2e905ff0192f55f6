"""How much a refresh holds at once beside weights and factors, in units of the weights' bytes."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from geometries import flat_geometry
from live_bytes import LiveBytes

#: `g`, `U g`, the displaced weights of a difference, and its product; for a diagonal also what a step of its own holds.
MOST = {"scalar": 4.1, "diagonal": 7.1}


@pytest.mark.parametrize("product_every", [1, 2])
@pytest.mark.parametrize("engine", ["finite-differences", "one-sided-differences"])
@pytest.mark.parametrize("structure", MOST)
def test_a_refresh_holds_few_vectors(structure, engine, product_every):
    """Six more where it knows products: the last one and two differences, each with what it was multiplied with."""
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))
    batch = torch.randn(2, 256), torch.randint(256, (2,))  # so few that activations weigh nothing
    geometry = flat_geometry(
        model, F.cross_entropy, structure=structure, engine=engine, steps=3, product_every=product_every
    )
    geometry.refresh(batch)
    factors = [factor for group in geometry.metric.factors() for factor in group.values()]
    gc.collect()
    with LiveBytes([*model.parameters(), *batch, *factors]) as live:
        geometry.refresh(batch)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    known = 6 if product_every > 1 else 0
    assert 3 + known < live.peak / weights < MOST[structure] + known


def wide():
    """A model whose activations on the batch are much larger than its weights, and the bytes of one pass's."""
    model = nn.Sequential(*(layer for _ in range(16) for layer in (nn.Linear(32, 32), nn.Tanh())), nn.Linear(32, 2))
    batch = torch.randn(4096, 32), torch.randint(2, (4096,))
    return model, batch, 16 * 4096 * 32 * 4  # what each Tanh keeps; linear layers keep their inputs, which are the same


@pytest.mark.parametrize("divergence", ["ngd", "newton"])
def test_activations_are_free_once_the_factors_are_learned(divergence):
    """A report may be for somebody who measures, on the same device."""
    model, batch, activations = wide()
    held = []
    geometry = flat_geometry(
        model, F.cross_entropy, divergence=divergence, steps=2, on_refresh=lambda _: held.append(live.now)
    )
    live = LiveBytes([*model.parameters(), *batch])
    gc.collect()
    gc.disable()
    try:
        with live:
            geometry.refresh(batch)
    finally:
        gc.enable()
    assert held[0] < activations / 4


@pytest.mark.parametrize("engine", ["forward", "finite-differences"])
def test_pieces_of_a_batch_are_linearised_one_by_one(engine):
    """Beside what a refresh of one piece alone holds there are only the outputs and vectors of the weights' size."""
    model, batch, activations = wide()
    peaks = []
    for rows in (512, 4096):
        geometry = flat_geometry(model, F.cross_entropy, engine=engine, micro_batch=512, steps=2)
        own = tuple(part[:rows] for part in batch)
        geometry.refresh(own)
        gc.collect()
        with LiveBytes([*model.parameters(), *batch]) as live:
            geometry.refresh(own)
        peaks.append(live.peak)
    one, all_pieces = peaks
    assert all_pieces - one < activations / 16  # half of a piece


@pytest.mark.parametrize("settings", [{"micro_batch": 8}, {"engine": "finite-differences", "divergence": "newton"}])
def test_low_precision_copies_of_the_weights_last_for_one_pass(settings):
    """Autocast keeps them until its outermost context ends, which here is that of the whole refresh."""
    model = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128))
    batch = torch.randn(32, 128), torch.randint(128, (32,))
    peaks = []
    for steps in (2, 6):
        geometry = flat_geometry(model, F.cross_entropy, autocast=torch.bfloat16, steps=steps, **settings)
        geometry.refresh(batch)
        gc.collect()
        with LiveBytes([*model.parameters(), *batch]) as live:
            geometry.refresh(batch)
        peaks.append(live.peak)
    assert peaks[0] == peaks[1]

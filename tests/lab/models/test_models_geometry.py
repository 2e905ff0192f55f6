"""Every network of the laboratory learns a metric of every structure from both divergences."""

import pytest
import torch
from torch.nn.functional import cross_entropy

import llqr
from geometries import flat_geometry
from llqr.lab import models
from llqr.lab.models.transformer import differentiable_forward

pytestmark = pytest.mark.slow

# A small member of every family: no block has more than a few hundred entries, so that a dense metric fits.
SMALL = {
    "mlp": {"image_size": 4, "channels": 3, "hidden": [8]},
    "cnn": {"image_size": 8, "width": 2, "channels": 3},
    "vgg16-bn": {"image_size": 32, "width": 1},
    "resnet18": {"image_size": 8, "width": 1},
    "wrn28-10": {"image_size": 4, "depth": 10, "widen": 1, "width": 2},
    "pyramidnet110": {"image_size": 4, "depth": 8, "alpha": 3, "width": 2},
    "resnet50": {"image_size": 32, "width": 1},
    "vit-ti": {"image_size": 8, "patch": 4, "depth": 1, "dim": 6},
    "vit-s": {"image_size": 8, "patch": 4, "depth": 1, "dim": 6},
    "vit-b": {"image_size": 8, "patch": 4, "depth": 1, "dim": 12},
    "vit-l": {"image_size": 8, "patch": 4, "depth": 1, "dim": 16},
}


@pytest.mark.parametrize("divergence", ["ngd", "newton"])
@pytest.mark.parametrize("name", models.BUILDERS)
def test_every_structure_is_learned_on_every_network(name, divergence):
    torch.manual_seed(0)
    model = models.build(name, classes=3, **SMALL[name]).double()
    size = SMALL[name]["image_size"]
    batch = torch.randn(4, 3, size, size, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    for structure in llqr.STRUCTURES.keys() - {"identity"}:
        settings = {"structure": structure, "divergence": divergence, "steps": 2, "engine": "double-backward"}
        geometry = flat_geometry(model, cross_entropy, forward=differentiable_forward, **settings)
        result = geometry.refresh(batch)
        assert result.accepted, (structure, result.reason)
        assert result.objective_after < result.objective_before, structure

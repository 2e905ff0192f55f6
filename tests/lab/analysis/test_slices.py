"""Slices of the loss surface."""

import pytest
import torch
from torch.nn import functional as F

from llqr.lab.analysis.sharpness import (
    LossSurface,
    along,
    along_eigenvector,
    along_random,
    filter_normalised,
    measure,
)
from small_models import batch_norm_cnn, mlp


@pytest.fixture
def surface():
    model = mlp()
    return LossSurface(model, F.cross_entropy, (torch.randn(12, 4, dtype=torch.float64), torch.randint(3, (12,))))


def test_a_slice_is_the_loss_at_moved_weights(surface):
    direction = torch.randn_like(surface.weights)
    positions, losses = along(surface, direction, reach=0.4, points=5)
    assert positions == pytest.approx([-0.4, -0.2, 0, 0.2, 0.4])
    model = mlp()
    x, y = surface._problem.inputs, surface._problem.targets
    for position, loss in zip(positions, losses, strict=True):
        torch.nn.utils.vector_to_parameters(surface.weights + position * direction, model.parameters())
        assert loss == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-12)
    torch.testing.assert_close(surface.weights, torch.nn.utils.parameters_to_vector(surface.model.parameters()))


def test_the_curvature_along_the_eigenvector_is_the_eigenvalue(surface):
    top = measure(surface, steps=500, tolerance=1e-9).top
    left, middle, right = along_eigenvector(surface, 7 * top.vector, reach=1e-3, points=3)["losses"]
    assert (left - 2 * middle + right) / 1e-6 == pytest.approx(top.value, rel=1e-4)


def test_the_steeper_side_is_on_the_right_whatever_the_sign(surface):
    vector = torch.randn_like(surface.weights)
    one, other = along_eigenvector(surface, vector), along_eigenvector(surface, -vector)
    assert one["losses"] == pytest.approx(other["losses"], rel=1e-12)
    assert one["losses"][-1] > one["losses"][0]


def test_filters_of_the_direction_have_the_norms_of_the_networks():
    model = batch_norm_cnn()
    batch = torch.randn(4, 1, 5, 5, dtype=torch.float64), torch.randint(3, (4,))
    surface = LossSurface(model, F.cross_entropy, batch)
    direction = surface.named(filter_normalised(surface, seed=3))
    for name, parameter in surface.parameters.items():
        if parameter.ndim < 2:
            assert not direction[name].any()
        else:
            ours, theirs = direction[name].flatten(1), parameter.flatten(1)
            torch.testing.assert_close(ours.norm(dim=1), theirs.norm(dim=1))
            assert not torch.allclose(ours, theirs, atol=0.1)


def test_a_filter_normalised_slice_does_not_change_when_layers_are_rescaled():
    """A ReLU network computes the same with one layer scaled up and the next one down; so must its slices look."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6, bias=False), torch.nn.ReLU(), torch.nn.Linear(6, 3)).double()
    batch = torch.randn(12, 4, dtype=torch.float64), torch.randint(3, (12,))
    before = along_random(LossSurface(model, F.cross_entropy, batch), seed=1, points=5)
    with torch.no_grad():
        model[0].weight *= 10
        model[2].weight /= 10
    after = along_random(LossSurface(model, F.cross_entropy, batch), seed=1, points=5)
    assert after["losses"] == pytest.approx(before["losses"], rel=1e-9)
    assert before["losses"][0] != pytest.approx(before["losses"][2], rel=1e-3)


def test_a_seed_decides_the_direction(surface):
    assert torch.equal(filter_normalised(surface, 1), filter_normalised(surface, 1))
    assert not torch.allclose(filter_normalised(surface, 1), filter_normalised(surface, 2))

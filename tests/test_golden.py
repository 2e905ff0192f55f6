"""The authors' own numbers, `tests/data/llqr_mlp.npz`, for every structure, divergence, probe and norm."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import llqr
from geometries import flat_geometry
from llqr.probes import Point
from references import relative_error

GOLDEN = np.load(Path(__file__).parent / "data" / "llqr_mlp.npz")
TOLERANCE = 1e-5

STRUCTURES = ["diagonal", "scalar", "kfac", "e-kfac", "diag-kfac"]
# An engine does not know the structure: one of them is enough to show that all engines give the authors' numbers.
LEARNED = [
    *((structure, "double-backward") for structure in STRUCTURES),
    ("e-kfac", "forward"),
    ("e-kfac", "linearised"),
]
NAMES = ["0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"]
NORMS = {
    "euclidean": "euclidean",
    "metric": "matrix_norm",
    "layer-euclidean": "layer_euclidean",
    "layer-metric": "layer_matrix_norm",
}


def stored(key):
    return torch.from_numpy(GOLDEN[key])


def model():
    network = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 5))
    network.load_state_dict({name: stored(f"param/{name}") for name in NAMES})
    return network


def batch(i):
    return stored("x")[i], stored("y")[i]


def gradients(network, i):
    loss = F.cross_entropy(network(batch(i)[0]), batch(i)[1])
    return loss, dict(zip(NAMES, torch.autograd.grad(loss, list(network.parameters())), strict=True))


def learned(structure, divergence, engine="double-backward"):
    """Three refreshes on batches 0, 1, 2 with the weights held fixed."""
    geometry = flat_geometry(
        model(), F.cross_entropy, structure=structure, divergence=divergence, ema=0.95, every=1, engine=engine
    )
    for i in range(3):
        assert geometry.refresh(batch(i)).accepted
        geometry.advance()
    return geometry


def point(network, grads):
    parameters = dict(network.named_parameters())
    return Point(
        parameters=[parameters[name] for name in NAMES],
        grads=[grads[name] for name in NAMES],
        names={parameter: name for name, parameter in parameters.items()},
    )


def check(displacement, key):
    for name, eps in zip(NAMES, displacement, strict=True):
        assert relative_error(eps, stored(f"{key}/{name}")) < TOLERANCE, name


def test_losses_and_gradient():
    network = model()
    for i in range(3):
        assert gradients(network, i)[0].item() == pytest.approx(float(GOLDEN["loss"][i]), rel=TOLERANCE)
    for name, gradient in gradients(network, 0)[1].items():
        assert relative_error(gradient, stored(f"grad/{name}")) < TOLERANCE


@pytest.mark.parametrize("divergence", ["ngd", "newton"])
@pytest.mark.parametrize(("structure", "engine"), LEARNED)
def test_the_learned_metric(structure, divergence, engine):
    geometry = learned(structure, divergence, engine)
    prefix = f"U/{structure}/{divergence}/"
    expected = {key.removeprefix(prefix): stored(key) for key in GOLDEN if key.startswith(prefix)}
    factors = geometry.metric.named_factors()
    assert set(factors) == set(expected)
    for name, factor in factors.items():
        # What was learned is the distance from the identity: compare that, it is far smaller than the factor.
        start = torch.eye(len(factor)) if factor.ndim == 2 and name.endswith(("/in", "/out")) else 1.0
        assert relative_error(factor, expected[name].reshape(factor.shape)) < TOLERANCE, name
        moved, golden = factor - start, expected[name].reshape(factor.shape) - start
        assert float(golden.norm()) > 0
        assert relative_error(moved, golden) < 1e-3, name
    applied = geometry.metric.apply({name: stored(f"grad/{name}") for name in NAMES})
    for name, moved in applied.items():
        assert relative_error(moved, stored(f"Ug/{structure}/{divergence}/{name}")) < TOLERANCE, name


@pytest.mark.parametrize("structure", ["diagonal", "kfac", "e-kfac"])
def test_probes_in_the_learned_metric(structure):
    geometry = learned(structure, "ngd")
    grads = {name: stored(f"grad/{name}") for name in NAMES}
    at = point(geometry.model, grads)
    for norm, key in NORMS.items():
        probe = llqr.SAMProbe(0.1, norm=norm)
        check(probe.displacement(at, lambda v: geometry.transport(at.parameters, v), 0), f"eps/{structure}/{key}")


@pytest.mark.parametrize(
    ("probe", "key"),
    [(llqr.SAMProbe(0.1), "sam"), (llqr.ASAMProbe(0.1), "asam"), (llqr.FisherSAMProbe(0.1), "fisher")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_probes_without_a_metric(probe, key):
    at = point(model(), {name: stored(f"grad/{name}") for name in NAMES})
    check(probe.displacement(at, lambda v: v, 0), f"eps/{key}")


def test_friendly_sam_over_three_batches():
    network, probe = model(), llqr.FriendlySAMProbe(0.1, lam=0.9)
    for i in range(3):
        at = point(network, gradients(network, i)[1])
        check(probe.displacement(at, lambda v: v, i), f"eps/fsam/{i}")


def test_every_stored_number_is_looked_at():
    keys = {key.split("/")[0] for key in GOLDEN}
    assert keys == {"x", "y", "param", "loss", "grad", "U", "Ug", "eps"}
    assert {key.split("/")[1] for key in GOLDEN if key.startswith(("U/", "Ug/"))} == set(STRUCTURES)
    probed = {
        tuple(key.split("/")[1:3]) for key in GOLDEN if key.startswith("eps/") and key.split("/")[1] in STRUCTURES
    }
    assert probed == {(structure, norm) for structure in ("diagonal", "kfac", "e-kfac") for norm in NORMS.values()}

"""No surprises in memory: `memory()` says what a metric will take before it is allocated."""

import pytest
import torch
from torch import nn

import llqr

from .training import batches, mlp, quick_geometry, sgd, train


@pytest.mark.parametrize("structure", llqr.STRUCTURES)
def test_what_is_announced_is_what_is_allocated(structure):
    model, data = mlp(), batches(4)
    geometry = quick_geometry(model, structure)
    announced = geometry.memory()
    assert announced["allocated"] == 0
    assert announced["total"] == sum(v for k, v in announced.items() if k not in ("total", "allocated"))
    train(llqr.LLQRSAM(sgd(model), geometry, rho=0.05), model, data)
    assert geometry.memory() == announced | {"allocated": announced["total"]}


def test_the_numbers_follow_from_the_shapes():
    """Linear(5, 8) and Linear(8, 3) in e-kfac: m^2 + n^2 + mn per matrix, a diagonal per bias, four bytes each."""
    memory = quick_geometry(mlp(), "e-kfac").memory()
    assert memory["e-kfac"] == 4 * ((64 + 25 + 40) + (9 + 64 + 24))
    assert memory["diagonal"] == 4 * (8 + 3)


def test_the_dtype_counts():
    model, data = mlp(), batches(1)
    geometry = quick_geometry(model, "kfac", dtype=torch.bfloat16)
    assert geometry.memory()["total"] * 2 == quick_geometry(model, "kfac").memory()["total"]
    geometry.refresh(data[0])
    assert geometry.memory()["allocated"] == geometry.memory()["total"]


def test_a_plan_for_a_model_that_would_not_fit():
    """A hundred gigabytes of parameters on the meta device, and their metric, take no memory to plan."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(50_000, 50_000) for _ in range(10)))
    memory = llqr.Metric(model, structure="kfac", max_side=50_000).memory()
    assert memory["kfac"] == 10 * 2 * 50_000**2 * 4
    assert memory["allocated"] == 0


def test_a_probe_takes_one_copy_of_the_weights_and_frees_it():
    """The copy is held during the second pass only, and there is no state besides that of the base."""
    model, data = mlp(), batches(3)
    opt = llqr.SAM(sgd(model), rho=0.05)
    held = []
    model[0].register_forward_hook(lambda *_: held.append(_copied(opt)))
    train(opt, model, data)
    assert held == [0, sum(p.nbytes for p in model.parameters())] * 3
    assert _copied(opt) == 0
    assert all(set(state) == {"momentum_buffer"} for state in opt.state.values())


def _copied(opt):
    return sum(copy.nbytes for _, copies in opt._weights._pairs for copy in copies)

"""Two processes under DDP in each framework, with accumulation, beside one process with the whole batch."""

from pathlib import Path

import pytest
import torch

import forked
from framework_ranks import ACCUMULATE, EPOCHS, deterministic_network
from reference_loops import train_by_hand
from small_trainings import samples, sgd

FRAMEWORKS = ("lightning", "accelerate", "transformers")
SCRIPT = Path(__file__).parent.parent / "support" / "framework_ranks.py"


@pytest.mark.slow
def test_two_ranks(tmp_path):
    """One test for all: it starts once what takes long to import."""
    run = forked.run(SCRIPT, str(tmp_path), folder=tmp_path)
    assert run.returncode == 0, run.stderr
    model = deterministic_network()
    train_by_hand(model, sgd(model), samples(), rho=0.1, accumulate=ACCUMULATE, epochs=EPOCHS)
    for framework in FRAMEWORKS:
        for ours in _both(tmp_path, f"{framework}-sam"):
            torch.testing.assert_close(ours, dict(model.state_dict()), rtol=1e-5, atol=1e-6)
    for framework in FRAMEWORKS:
        first, second = _both(tmp_path, f"{framework}-llqr+sam")
        assert all(torch.equal(first[name], second[name]) for name in first)  # the metric does not drift
        assert not torch.equal(first["0.weight"], ours["0.weight"])
    assert [len(found) for found in _both(tmp_path, "warned")] == [1, 1]


def _both(folder, name):
    return [torch.load(folder / f"{name}{rank}.pt") for rank in range(2)]

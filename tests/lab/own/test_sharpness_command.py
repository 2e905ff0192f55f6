"""`llqr sharpness`: the Hessian of a network that was trained elsewhere, from a file of weights."""

import json

import pytest
import torch
from torch import nn

from llqr.lab.cli.app import main

FILE = """
import torch
from torch import nn
from llqr.lab import Experiment

draw = torch.Generator().manual_seed(0)
x = torch.randn(24, 4, generator=draw)
y = torch.randn(24, 2, generator=draw)


def experiment():
    return Experiment(model=nn.Linear(4, 2), loss=nn.MSELoss(), train=(x, y), test=(x, y))
"""


@pytest.fixture
def measured(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILE)

    def run(saved, *options):
        if saved is not None:
            torch.save(saved, "weights.pt")
        with pytest.raises(SystemExit) as exit_:
            main(["sharpness", "weights.pt", "mine.py", "--device", "cpu", *options])
        return exit_.value.code, *capsys.readouterr()

    return run


def test_the_numbers_are_those_of_the_dense_hessian(measured):
    model = nn.Linear(4, 2)
    code, out, _ = measured(model.state_dict(), "--json", "--products", "400", "--rho", "0.1")
    assert code == 0
    found = json.loads(out)
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    inputs = torch.cat([x, torch.ones(24, 1)], 1).double()
    hessian = torch.kron(torch.eye(2).double(), inputs.T @ inputs / 24)  # of the mean over 48 numbers
    values = torch.linalg.eigvalsh(hessian)
    assert found["top_eigenvalue"]["value"] == pytest.approx(values[-1].item(), rel=1e-3)
    assert abs(found["trace"]["value"] - values.sum().item()) < 4 * found["trace"]["error"]
    assert found["trace"]["error"] < 0.1 * values.sum().item()
    assert found["evaluation"]["loss"] == pytest.approx(found["loss"], rel=1e-5)
    assert found["rise"] > 0
    code, out, _ = measured(None)
    assert (code, "top eigenvalue of the Hessian" in out, "test loss" in out) == (0, True, True)


def test_weights_are_found_whichever_way_they_were_saved(measured):
    state = nn.Linear(4, 2).state_dict()
    numbers = set()
    for saved in (
        state,
        {"model": state, "epoch": 3},
        {f"module.{name}": tensor for name, tensor in state.items()},
        {"state_dict": {f"net.{name}": tensor for name, tensor in state.items()} | {"loss.weight": torch.ones(3)}},
    ):
        code, out, err = measured(saved, "--json", "--products", "2")
        assert code == 0, err
        numbers.add(json.loads(out)["loss"])
    assert len(numbers) == 1


def test_a_file_that_does_not_fit_is_named(measured, tmp_path):
    assert 'Missing key(s) in state_dict: "weight"' in measured(nn.BatchNorm1d(3, affine=False).state_dict())[2]
    assert "size mismatch for weight" in measured(nn.Linear(5, 2).state_dict())[2]
    assert "does not fit the model" in measured({"epoch": 3})[2]
    for garbage in ("garbage", "", "e"):
        (tmp_path / "weights.pt").write_text(garbage)
        code, _, err = measured(None)
        assert (code, "weights.pt is not a readable file of weights" in err) == (3, True)
    said = measured(nn.Linear(4, 2))[2]  # a network, not its weights
    assert "is not a readable file of weights" in said
    assert ("weights_only" in said, "\x1b" in said) == (False, False)  # torch's advice is to trust the file
    (tmp_path / "weights.pt").unlink()
    assert measured(None)[2] == "llqr: weights.pt is not there.\n"

"""The command under torchrun, stopped by a signal and continued by one process."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from resumed_runs import command, folder_of

pytestmark = pytest.mark.slow
#: Seconds, on a busy machine too; a rank that waits for one that is gone does so for half an hour.
LONG = 300


def started(processes, *arguments):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", processes, "-m", "llqr"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*launcher, *arguments], env=environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_a_checkpoint_that_one_process_continues(tmp_path, strategy, number):
    ranks = started("2", *command(tmp_path), "--strategy", strategy)
    deadline = time.monotonic() + LONG
    while not (folder_of(tmp_path) / "checkpoint.pt").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    ranks.send_signal(number)
    _, said = ranks.communicate(timeout=LONG)
    assert ranks.returncode != 0, "torchrun's own code"
    assert said.count("the same command resumes from the checkpoint") == 1, said
    assert not (folder_of(tmp_path) / "result.json").exists()
    alone = [sys.executable, "-m", "llqr", *command(tmp_path)]
    assert subprocess.run(alone, timeout=LONG, check=False).returncode == 0
    never_stopped = tmp_path / "never stopped"
    assert subprocess.run([*alone, "--out", str(never_stopped)], timeout=LONG, check=False).returncode == 0
    ends = [torch.load(folder_of(out) / "checkpoint.pt", weights_only=True) for out in (tmp_path, never_stopped)]
    assert str(ends[0]["batches"]) == str(ends[1]["batches"])
    assert ends[0]["log"][-1]["test"]["accuracy"] == pytest.approx(ends[1]["log"][-1]["test"]["accuracy"], abs=2)


def test_a_strategy_is_asked_for(tmp_path):
    ranks = started("2", *command(tmp_path))
    _, said = ranks.communicate(timeout=LONG)
    assert ranks.returncode != 0
    assert "--strategy must be given where torchrun starts several processes" in said
    assert not folder_of(tmp_path).exists()


OWN = """
import os
import torch
from torch import nn
from llqr.lab import Experiment

x = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
y = x[:, :3].argmax(1)
passes = 0


def loss(outputs, targets):
    global passes
    passes += outputs.requires_grad
    if passes == 5 and os.environ.get("RANK") == "1":
        raise RuntimeError("a rank that fails in a step")
    return nn.functional.cross_entropy(outputs, targets)


def experiment():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    return Experiment(model=model, loss=loss, train=(x[:32], y[:32]), test=(x[32:], y[32:]), epochs=9, batch_size=8)
"""


def test_a_rank_that_fails_in_a_step_leaves_none_waiting(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    arguments = ["train", str(file), "--method", "sam", "--out", str(tmp_path / "runs"), "--device", "cpu"]
    ranks = started("2", *arguments, "--strategy", "ddp")
    _, said = ranks.communicate(timeout=LONG)
    assert ranks.returncode != 0
    assert "a rank that fails in a step" in said

"""A short training by the command line, stopped or killed and started again, and what its end must equal."""

import json
import os
import subprocess
import sys

import torch

from llqr.lab.stop import Stop

#: Seconds that only a process that hangs takes, however busy the machine is.
LONG = 1800
CHANGES = ("training.epochs=5", "training.batch_size=6", "geometries.ngd.inner.steps=2")


class StopAfter(Stop):
    """Asks to stop when it has been asked so often: a loop asks once in every step."""

    def __init__(self, questions):
        super().__init__()
        self.left = questions

    @property
    def requested(self):
        self.left -= 1
        if self.left <= 0:
            self.reason = "a test"
        return bool(self.reason)


def command(out):
    settings = [part for change in CHANGES for part in ("--set", change)]
    arguments = ["train", "digits/mlp", "--method", "llqr-ngd+sam", "--out", str(out), "--quiet", "--device", "cpu"]
    return [*arguments, *settings, "--checkpoint-minutes", "0"]


def folder_of(out):
    return out / "digits/mlp/llqr-ngd+sam/seed0"


def start(out):
    """The command in a process of its own."""
    arguments = [sys.executable, "-m", "llqr", *command(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(arguments, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)


def assert_same_end(one, other):
    """Weights, buffers, optimizer, metric and random states bit-exact, and every logged number that is not a time."""
    states = [torch.load(folder / "checkpoint.pt", weights_only=True) for folder in (one, other)]
    flat = [dict(leaves(state)) for state in states]
    assert flat[0].keys() == flat[1].keys()
    for key, value in flat[0].items():
        same = torch.equal(value, flat[1][key]) if isinstance(value, torch.Tensor) else value == flat[1][key]
        assert same, key
    logs = [[timeless(json.loads(line)) for line in (f / "log.jsonl").read_text().splitlines()] for f in (one, other)]
    assert logs[0] == logs[1]


def leaves(value, key=""):
    """The entries of a checkpoint, without times (and without the mean loss of an epoch that has not begun)."""
    if isinstance(value, dict):
        for name, entry in value.items():
            if name not in ("seconds", "rate", "mean_loss"):
                yield from leaves(entry, f"{key}/{name}")
    elif isinstance(value, list):
        for number, entry in enumerate(value):
            yield from leaves(entry, f"{key}/{number}")
    else:
        yield key, value


def timeless(record):
    refreshes = [{k: v for k, v in report.items() if k != "seconds"} for report in record["refreshes"]]
    return {k: v for k, v in record.items() if k not in ("seconds", "rate")} | {"refreshes": refreshes}

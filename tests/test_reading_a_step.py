"""How much code a step passes through: a reader should be able to follow it."""

import subprocess
import sys

import torch
from torch import nn

import llqr

cross_entropy = nn.functional.cross_entropy
TRAIN = """
import sys
from llqr.lab.cli.app import app
words = "train digits/mlp --method sam --set training.epochs=1 --quiet --device cpu --out".split()
app([*words, sys.argv[1]], standalone_mode=False)
print(*sorted(name for name in sys.modules if name.split(".")[0] == "llqr"))
"""


def files_run(step):
    """The files of the library that a call passes through."""
    files = set()

    def trace(frame, event, argument):
        if "/llqr/" in frame.f_code.co_filename:
            files.add(frame.f_code.co_filename)

    sys.settrace(trace)
    try:
        step()
    finally:
        sys.settrace(None)
    return files


def training(make):
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    batch = torch.randn(32, 8), torch.randint(3, (32,))
    opt = make(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    def closure():
        opt.zero_grad()
        loss = cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        return loss

    return lambda: opt.step(closure, batch=batch)


def test_a_warm_step_of_sam():
    step = training(lambda model, base: llqr.SAM(base, rho=0.05, model=model))
    step()
    assert len(files_run(step)) <= 8


def test_a_step_with_a_refresh():
    def make(model, base):
        return llqr.LLQRSAM(base, llqr.Geometry(model, cross_entropy, every=1), rho=0.05)

    step = training(make)
    step()
    assert len(files_run(step)) <= 25


def test_a_training_run_imports_no_bench_and_no_report(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", TRAIN, tmp_path], capture_output=True, text=True, check=True, timeout=600
    )
    loaded = run.stdout.splitlines()[-1].split()
    assert len(loaded) <= 110
    assert not [name for name in loaded if name.startswith(("llqr.lab.bench", "llqr.lab.report"))]

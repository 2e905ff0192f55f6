"""Runs over text that were stopped or killed in the middle of an epoch end bit-equal to those left alone."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from test_resume import resume

from llqr.lab.cli.app import main
from llqr.lab.config import recipe
from llqr.lab.runs.planned import plan
from llqr.lab.stop import Stop
from llqr.lab.training.loop import Training
from resumed_runs import LONG, StopAfter, assert_same_end, leaves
from tiny_text import reversal

CPU = torch.device("cpu")
TRANSLATION = "iwslt14/transformer_iwslt_de_en@tiny"
GEOMETRY = [f"geometries.ngd.{setting}" for setting in ("every=5", "inner.steps=2", "batch_size=4")]
SHORT = [
    "training.steps=23",
    "training.evaluate_every=7",
    "training.batch_size=256",
    "model.options.dropout=0.2",
    "probes.sam.start_after=4",
    "probes.fsam.start_after=4",
    *GEOMETRY,
]
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:max_side")]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return reversal(tmp_path_factory.mktemp("texts"), train=150, held_out=10)


def planned_for(folder, texts, method):
    loaded = recipe.load(TRANSLATION, ["data.name=reversal", f'data.root="{texts}"', *SHORT])
    (planned,) = plan(TRANSLATION, loaded, [method], [0], folder)
    planned.path.mkdir(parents=True, exist_ok=True)
    return planned


def timeless(folder):
    result = json.loads((folder / "result.json").read_text())
    return {key: value for key, value in result.items() if "seconds" not in key and key != "rate"}


def assert_same_outcome(one, other):
    """The end of both runs, their best weights, and what was measured of those."""
    assert_same_end(one, other)
    best = [dict(leaves(torch.load(folder / "best.pt", weights_only=True))) for folder in (one, other)]
    assert best[0].keys() == best[1].keys()
    for key, value in best[0].items():
        assert torch.equal(value, best[1][key]) if isinstance(value, torch.Tensor) else value == best[1][key], key
    assert timeless(one) == timeless(other)


@pytest.mark.parametrize("method", ["adamw", "llqr-ngd+sam", "llqr-ngd+fsam"])
def test_stopping_anywhere_changes_nothing(texts, tmp_path, method):
    """In the middle of an epoch and of an interval between evaluations, right after one, and with dropout."""
    whole = planned_for(tmp_path / "whole", texts, method)
    assert resume(whole, Stop())
    parts = planned_for(tmp_path / "parts", texts, method)
    for steps in (3, 2, 4, 9):
        assert not resume(parts, StopAfter(steps))
    state = torch.load(parts.path / "checkpoint.pt", weights_only=True)
    assert state["batches"]["position"] > 0  # some batches of an epoch were handed out
    assert resume(parts, Stop())
    assert_same_outcome(whole.path, parts.path)


def test_a_run_stopped_before_its_test_is_tested_when_it_is_resumed(texts, tmp_path, monkeypatch):
    planned = planned_for(tmp_path, texts, "adamw")
    with monkeypatch.context() as patched:
        patched.setattr(Training, "test", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            resume(planned, Stop())
    assert not (planned.path / "result.json").exists()
    assert resume(planned, Stop())
    whole = planned_for(tmp_path / "whole", texts, "adamw")
    assert resume(whole, Stop())
    assert_same_outcome(whole.path, planned.path)


# -- in a process of its own -----------------------------------------------------------------------------------------


def command(out, texts):
    settings = (*SHORT, "training.steps=80", "geometries.ngd.every=20", "data.name=reversal")
    changes = [part for setting in settings for part in ("--set", setting)]
    arguments = ["train", TRANSLATION, "--method", "llqr-ngd+sam", "--out", str(out), "--data-dir", str(texts)]
    return [*arguments, *changes, "--quiet", "--device", "cpu", "--checkpoint-minutes", "0"]


def finish(out, texts):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with pytest.raises(SystemExit) as end:
            main(command(out, texts))
    finally:
        torch.set_num_threads(threads)
    assert end.value.code == 0


def test_a_killed_process_resumes_in_the_middle_of_an_epoch(texts, tmp_path):
    out = tmp_path / "killed"
    folder = out / TRANSLATION / "llqr-ngd+sam/seed0"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, "-m", "llqr", *command(out, texts)]
    process = subprocess.Popen(arguments, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + LONG
    log = folder / "log.jsonl"
    while not log.exists() or len(log.read_text().splitlines()) < 3:
        assert process.poll() is None, process.stderr.read().decode()
        assert time.monotonic() < deadline, "no third evaluation"
        time.sleep(0.01)
    process.kill()
    assert process.wait(LONG) == -signal.SIGKILL
    assert not (folder / "result.json").exists()
    loaded = recipe.load(TRANSLATION, ["data.name=reversal", f'data.root="{texts}"'])
    task = loaded.run("adamw").load_task(CPU)
    done = torch.load(folder / "checkpoint.pt", weights_only=True)["optimizer"]["param_groups"][0]["llqr"]["steps"]
    assert done % 7 == 0  # checkpoints are written at evaluations
    assert done % len(task.train_batches(256, seed=0))  # which are not at the ends of epochs
    finish(out, texts)
    finish(tmp_path / "whole", texts)
    assert_same_outcome(tmp_path / "whole" / TRANSLATION / "llqr-ngd+sam/seed0", folder)

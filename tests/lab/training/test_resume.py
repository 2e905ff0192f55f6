"""A run that was stopped, interrupted or killed goes on and ends bit-equal to one that was left alone."""

import json
import os
import signal
import time

import pytest
import torch
from torch import nn

from llqr.lab.cli.app import main
from llqr.lab.config import recipe
from llqr.lab.config.run import Run
from llqr.lab.config.strict import ConfigurationError
from llqr.lab.errors import DataError
from llqr.lab.progress import Display
from llqr.lab.runs.folder import RunFolder
from llqr.lab.runs.planned import plan
from llqr.lab.stop import Stop
from llqr.lab.training import checkpoint
from llqr.lab.training.carry_out import carry_out
from llqr.lab.training.loop import Execution, Training
from resumed_runs import LONG, StopAfter, assert_same_end, command, folder_of, start

CPU = torch.device("cpu")
SETTINGS = [
    "training.epochs=3",
    *(
        f"geometries.{name}.{setting}"
        for name in ("ngd", "newton")
        for setting in ("every=10", "inner.steps=2", "batch_size=32")
    ),
]


def planned_for(folder, method, *overrides):
    loaded = recipe.load("digits/mlp", [*SETTINGS, *overrides])
    (planned,) = plan("digits/mlp", loaded, [method], [0], folder)
    planned.path.mkdir(parents=True, exist_ok=True)
    return planned


def resume(planned, stop):
    training = Training(planned, planned.run.load_task(CPU), Execution(CPU))
    training.resume()
    return training.run(stop, Display(quiet=True))


@pytest.mark.parametrize(
    "method",
    ["adam", "llqr-newton", "fsam", "llqr-ngd+fsam", pytest.param("llqr-ngd-probe-only+sam", marks=pytest.mark.slow)],
)
def test_stopping_anywhere_changes_nothing(tmp_path, method):
    """Stops twice in one epoch, at its last step, and after the first of the next, on a network with BatchNorm."""
    overrides = ("training.epochs=2", "model.name=cnn", "data.options.crop_padding=1", "data.options.cutout=2")
    whole = planned_for(tmp_path / "whole", method, *overrides)
    assert resume(whole, Stop())
    parts = planned_for(tmp_path / "parts", method, *overrides)
    for steps in (5, 3, 15, 1):
        assert not resume(parts, StopAfter(steps))
    assert resume(parts, Stop())
    assert_same_end(whole.path, parts.path)


def test_dropout_resumes_with_the_same_random_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(
        Run, "build_model", lambda self: nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))
    )
    whole, parts = planned_for(tmp_path / "whole", "sam"), planned_for(tmp_path / "parts", "sam")
    assert resume(whole, Stop())
    assert not resume(parts, StopAfter(30))
    assert resume(parts, Stop())
    assert_same_end(whole.path, parts.path)


def test_a_stop_in_the_middle_of_an_epoch_takes_effect_at_once(tmp_path):
    planned = planned_for(tmp_path, "sgdm")
    assert not resume(planned, StopAfter(6))
    state = torch.load(planned.path / "checkpoint.pt", weights_only=True)
    assert (state["batches"]["epoch"], state["batches"]["position"]) == (1, 6)
    assert not (planned.path / "log.jsonl").read_text()


def finish(out):
    """The same command in this process, to its end."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with pytest.raises(SystemExit) as exit_:
            main(command(out))
    finally:
        torch.set_num_threads(threads)
    assert exit_.value.code == 0


def wait_for_epochs(process, epochs, out):
    """Until the log of the process has so many lines."""
    deadline = time.monotonic() + LONG
    log = folder_of(out) / "log.jsonl"
    while time.monotonic() < deadline:
        if log.exists() and len(log.read_text().splitlines()) >= epochs:
            return
        assert process.poll() is None, process.stderr.read().decode()
        time.sleep(0.01)
    raise AssertionError(f"{log} never had {epochs} lines")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    out = tmp_path_factory.mktemp("uninterrupted")
    finish(out)
    return folder_of(out)


@pytest.mark.slow
def test_a_killed_process_resumes_from_its_last_checkpoint(tmp_path, uninterrupted):
    folder = folder_of(tmp_path)
    process = start(tmp_path)
    wait_for_epochs(process, 2, tmp_path)
    process.kill()
    assert process.wait(LONG) == -signal.SIGKILL
    assert not (folder / "result.json").exists()
    # What the killed process wrote after its checkpoint must not stay in the log.
    with (folder / "log.jsonl").open("a") as log:
        log.write('{"epoch": 3, "trai')
    finish(tmp_path)
    assert_same_end(uninterrupted, folder)
    assert len(json.loads((folder / "config.json").read_text())["resumed"]) == 1


@pytest.mark.slow
def test_a_terminated_process_leaves_a_checkpoint_and_exit_code_75(tmp_path, uninterrupted):
    process = start(tmp_path)
    wait_for_epochs(process, 1, tmp_path)
    process.terminate()
    message = process.communicate(timeout=LONG)[1].decode()
    assert process.returncode == 75, message
    assert "stopped by SIGTERM" in message
    assert "Traceback" not in message
    assert not (folder_of(tmp_path) / "result.json").exists()
    finish(tmp_path)
    assert_same_end(uninterrupted, folder_of(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_to_stop_and_ctrl_c_after_it_interrupts(number):
    before = signal.getsignal(number)
    with Stop() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)  # of a scheduler, which may repeat it
        assert stop.requested
        assert stop.reason == number.name
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(number) == before


def test_a_finished_run_is_read_and_not_made_again(tmp_path):
    planned = planned_for(tmp_path, "sgdm")
    first = carry_out([planned], Execution(CPU), Stop(), Display(quiet=True))
    written = (planned.path / "checkpoint.pt").stat().st_mtime_ns
    assert carry_out([planned], Execution(CPU), Stop(), Display(quiet=True)) == first
    assert (planned.path / "checkpoint.pt").stat().st_mtime_ns == written


def test_a_folder_of_another_run_is_refused_and_the_difference_named(tmp_path):
    carry_out([planned_for(tmp_path, "sgdm")], Execution(CPU), Stop(), Display(quiet=True))
    other = planned_for(tmp_path, "sgdm", "bases.sgdm.lr=0.1")
    with pytest.raises(ConfigurationError, match=r"--out: .* holds a run with run.base.lr = 0.05, not 0.1"):
        RunFolder(other.path).check(other)
    elsewhere = planned_for(tmp_path, "sgdm", "data.root=elsewhere")
    RunFolder(elsewhere.path).check(elsewhere)


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path):
    path = tmp_path / "checkpoint.pt"
    checkpoint.save({"number": 1}, path)
    with pytest.raises((AttributeError, TypeError, RuntimeError)):
        checkpoint.save({"number": lambda: 2}, path)
    assert checkpoint.load(path, CPU) == {"number": 1}


def test_a_damaged_checkpoint_is_named(tmp_path):
    path = tmp_path / "checkpoint.pt"
    checkpoint.save({"weights": torch.zeros(1000)}, path)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(DataError, match=r"checkpoint.pt is not a readable checkpoint"):
        checkpoint.load(path, CPU)


def test_a_checkpoint_of_another_network_is_refused(tmp_path):
    planned = planned_for(tmp_path, "sgdm")
    assert not resume(planned, StopAfter(3))
    with pytest.raises(ConfigurationError, match="does not fit this run"):
        resume(planned_for(tmp_path, "sgdm", "model.options.hidden=[5]"), Stop())


def test_the_effect_on_each_layer_is_in_the_result_also_after_a_resume(tmp_path):
    planned = planned_for(tmp_path, "llqr-ngd", "training.epochs=1", "geometries.ngd.every=100")
    assert not resume(planned, StopAfter(3))
    result = resume(planned, Stop())  # without a refresh of its own
    assert result["layer_effects"].keys() == {"1", "3", "5"}
    (record,) = (json.loads(line) for line in (planned.path / "log.jsonl").read_text().splitlines())
    (last,) = record["refreshes"]
    changes = [effect["change"] for effect in result["layer_effects"].values()]
    assert min(changes) - 1e-4 <= last["change"] <= max(changes) + 1e-4
    assert all(-1 <= effect["cosine"] <= 1 for effect in result["layer_effects"].values())


@pytest.mark.parametrize("finished", [True, False])
def test_a_run_that_another_process_made_meanwhile_with_other_settings_is_refused(tmp_path, finished):
    """While the first run is made, another process makes the second one, or its checkpoint, with another rate."""
    first, second = planned_for(tmp_path, "sgdm"), planned_for(tmp_path, "sam")

    class Meanwhile(Display):
        def end(self, outcome):
            other = planned_for(tmp_path, "sam", "bases.sgdm.lr=0.1")
            RunFolder(other.path).begin(other, {"device": "cpu"})
            training = Training(other, other.run.load_task(CPU), Execution(CPU))
            training.resume()
            training.run(Stop() if finished else StopAfter(5), Display(quiet=True))

    with pytest.raises(ConfigurationError, match=r"holds a run with run.base.lr = 0.1, not 0.05"):
        carry_out([first, second], Execution(CPU), Stop(), Meanwhile(quiet=True))

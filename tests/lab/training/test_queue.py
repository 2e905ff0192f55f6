"""Several runs at a time, each in a process of its own: `--jobs`."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fake_runs import ACCURACY, record, result_of
from llqr.lab import machine
from llqr.lab.cli.runs import RunOptions
from llqr.lab.config import recipe
from llqr.lab.errors import DataError, RunsFailed, Stopped
from llqr.lab.progress import Display
from llqr.lab.runs.folder import RunFolder
from llqr.lab.runs.json_files import plain
from llqr.lab.runs.planned import plan
from llqr.lab.stop import Stop
from llqr.lab.training.carry_out import carry_out_together

TABLE = ["reproduce", "digits", "--row=mlp", "--methods=sgdm,sam", "--seeds=1", "--jobs=2", "--device=cpu"]
SHORT = "--set=training.epochs=2"
DONE = result_of("digits/mlp", "sgdm", 0, 90.0, ACCURACY, [record(4, "sgdm", 90.0, ACCURACY, 4)])
# A process in place of `llqr train`: it writes its result, fails, or waits until it is asked to stop.
FINISH = "import json, sys; json.dump(json.loads(sys.argv[2]), open(sys.argv[1] + '/result.json', 'w'))"
FAIL = "import sys; sys.exit('llqr: the training loss is nan.')"
KILLED = "import os; os.kill(os.getpid(), 9)"
WAIT = """import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
pathlib.Path(sys.argv[1], "waits").touch()
time.sleep(60)
"""
BUSY = """import pathlib, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, lambda *_: pathlib.Path(sys.argv[1], "asked").touch())
pathlib.Path(sys.argv[1], "waits").touch()
time.sleep(60)
"""


@pytest.fixture
def planned(tmp_path):
    return plan("digits/mlp", recipe.load("digits/mlp"), ["sgdm", "sam", "llqr-ngd"], [0], tmp_path)


@pytest.fixture
def together(planned):
    def carry_out(*programs, jobs=2, stop=None):
        commands = [
            [sys.executable, "-c", program, str(one.path), json.dumps(DONE)]
            for one, program in zip(planned, programs, strict=True)
        ]
        return carry_out_together(planned, commands, jobs, stop or Stop(), Display(quiet=True))

    return carry_out


class StopWhen(Stop):
    """Asks to stop when a file is there."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    @property
    def requested(self):
        self.reason = self.reason or ("SIGINT" if self.path.exists() else "")
        return bool(self.reason)


def test_a_run_that_fails_does_not_stop_the_others_and_is_named(together, planned):
    with pytest.raises(RunsFailed) as error:
        together(FAIL, FINISH, KILLED)
    assert str(error.value) == (
        "1 of 3 runs are done.\n"
        "digits/mlp sgdm seed 0 failed: the training loss is nan.\n"
        "digits/mlp llqr-ngd seed 0 failed: killed by signal 9"
    )
    assert together(FINISH, FAIL, FINISH) == [DONE] * 3  # the second one is done already


def test_a_stop_reaches_every_process_and_the_same_call_does_the_rest(together, planned):
    with pytest.raises(Stopped) as error:
        together(FINISH, WAIT, FINISH, jobs=1, stop=StopWhen(planned[1].path / "waits"))
    assert str(error.value) == (
        "Stopped by SIGINT: 1 of 3 runs are done, left are digits/mlp sam seed 0, digits/mlp llqr-ngd seed 0; "
        "the same command resumes."
    )
    assert together(FAIL, FINISH, FINISH) == [DONE] * 3


def test_a_process_that_a_scheduler_stops_before_it_listens_is_left_and_not_failed(together):
    terminated = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    with pytest.raises(Stopped, match=r"^Stopped by a signal: 2 of 3 runs are done, left are digits/mlp sgdm seed 0;"):
        together(terminated, FINISH, FINISH)


def test_a_second_ctrl_c_does_not_wait_for_checkpoints(together, planned):
    class Twice(StopWhen):
        @property
        def requested(self):
            if (self.path.parent / "asked").exists():
                raise KeyboardInterrupt
            return super().requested

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        together(BUSY, FINISH, FINISH, jobs=1, stop=Twice(planned[0].path / "waits"))
    assert time.monotonic() - began < 50


def test_an_error_stops_the_other_processes(together, planned):
    wait = f"import pathlib, time\nwhile not pathlib.Path({str(planned[1].path)!r}, 'waits').exists(): time.sleep(0.01)"
    began = time.monotonic()
    with pytest.raises(DataError, match=r"result.json is damaged"):
        together(f"{wait}\nimport sys; open(sys.argv[1] + '/result.json', 'w').write('{{')", WAIT, FINISH)
    assert time.monotonic() - began < 50


def test_a_process_that_is_stopped_after_it_wrote_its_result_is_done(together, planned):
    late = f"{FINISH}; {WAIT}"
    with pytest.raises(Stopped, match="1 of 3 runs are done, left are digits/mlp sam seed 0, digits/mlp llqr-ngd seed"):
        together(late, FINISH, FINISH, jobs=1, stop=StopWhen(planned[0].path / "waits"))


def test_a_run_that_another_process_makes_meanwhile_is_done(together, planned):
    """At first it is in use, of which its process complains."""
    finish = FINISH.replace("sys.argv[1]", repr(str(planned[0].path)))
    assert together(FAIL, f"{finish}; {FINISH}", FINISH, jobs=1) == [DONE] * 3


def test_a_run_of_other_settings_that_another_process_makes_meanwhile_is_not_taken(together, planned):
    other = planned[0].to_dict() | {"seed": 1, "started": "", "command": "", "machine": {"device": ""}, "resumed": []}
    config = f"open(sys.argv[1] + '/config.json', 'w').write({json.dumps(json.dumps(plain(other)))})"
    with pytest.raises(RunsFailed, match=r"2 of 3 runs are done.\ndigits/mlp sgdm seed 0 failed: .* loss is nan.$"):
        together(f"{FINISH}; {config}; {FAIL}", FINISH, FINISH)


def test_no_more_than_jobs_at_a_time(together, planned):
    started = planned[0].path.parents[1] / "running"
    one_at_a_time = f"import pathlib, time; p = pathlib.Path({str(started)!r}); p.mkdir(); time.sleep(0.1); p.rmdir()"
    assert together(*[f"{one_at_a_time}; {FINISH}"] * 3, jobs=1) == [DONE] * 3


def test_the_processes_use_the_device_of_the_command(planned, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert "--device=cuda" in RunOptions(device="auto").train_command("digits/mlp", planned[0])


@pytest.mark.slow
def test_a_sweep_has_runs_of_one_name_in_several_folders(llqr, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(machine.__file__).parents[2]))
    sweep = ["--sweep=bases.sgdm.lr=1e-6,0.1", "--set=data.options.validation=200", SHORT]
    code, out, err = llqr("compare", "digits/mlp", "--methods=sgdm", "--seeds=1", *TABLE[-2:], *sweep)
    assert code == 0, err
    assert "sgdm: of 2, digits/mlp bases.sgdm.lr=0.1 has the best last validation accuracy" in out
    assert len(list(tmp_path.glob("runs/*/digits/mlp/sgdm/seed0/result.json"))) == 2


def kept(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted((line["run"]["method"], line["machine"].get("shared"), line["command"][:30]) for line in lines)


def test_the_command_makes_and_keeps_whole_runs_once(llqr, tmp_path, monkeypatch):
    """One run fails by a damaged checkpoint, and is made when that is gone."""
    monkeypatch.setenv("PYTHONPATH", str(Path(machine.__file__).parents[2]))  # it may name a relative folder
    arguments = (*TABLE, SHORT, "--keep", "kept/digits.jsonl")
    (tmp_path / "runs/digits/mlp/sam/seed0").mkdir(parents=True)
    (tmp_path / "runs/digits/mlp/sam/seed0/checkpoint.pt").write_text("damaged")
    code, _, err = llqr(*arguments)
    assert (code, err.count("digits/mlp sam seed 0 failed: ")) == (1, 2), err  # when it fails, and at the end
    assert "kept/digits.jsonl: 1 added, 0 there already" in err
    assert kept(tmp_path / "kept/digits.jsonl") == [("sgdm", True, "llqr train digits/mlp --method")]
    (tmp_path / "runs/digits/mlp/sam/seed0/checkpoint.pt").unlink()
    code, _, err = llqr(*arguments)
    assert (code, "kept/digits.jsonl: 1 added, 0 there already" in err) == (0, True), err
    assert "1 of 2 runs are in kept already" in err
    assert "(1 of 1 runs)" in err
    assert [method for method, *_ in kept(tmp_path / "kept/digits.jsonl")] == ["sam", "sgdm"]


@pytest.mark.slow
def test_ctrl_c_leaves_checkpoints_and_the_same_command_resumes(tmp_path):
    command = [sys.executable, "-m", "llqr", *TABLE, "--set=training.epochs=20000", "--out", str(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    folders = [RunFolder(tmp_path / "digits/mlp" / method / "seed0") for method in ("sgdm", "sam")]
    while not all(folder.log.path.exists() and folder.log.path.stat().st_size for folder in folders):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert "0 of 2 runs are done, left are digits/mlp sgdm seed 0, digits/mlp sam seed 0; the same command" in err
    assert all(folder.checkpoint.exists() for folder in folders)
    assert "stopped by SIGTERM" in folders[0].last_output()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("exit 0", "MPS is running."),
        ('test "$1" = -d -a -z "$CUDA_VISIBLE_DEVICES"', "Started MPS; "),
        ("exit 1", "-d failed: the runs take turns on the GPU."),
        (None, "There is no nvidia-cuda-mps-control: the runs take turns on the GPU."),
    ],
)
def test_mps_is_started_where_it_is_there(tmp_path, monkeypatch, script, said):
    if script is not None:
        program = tmp_path / "nvidia-cuda-mps-control"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o700)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # of the runs, not of what they share
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin" if script else str(tmp_path))
    assert said in machine.share_gpu()

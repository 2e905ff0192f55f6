"""Ctrl-C at any moment of a command, from its first line to its last: an exit code that is true, and no traceback."""

import signal
import subprocess
import sys
import time

import pytest

#: Files that appear one after the other, and seconds to wait after that: 21 moments, however busy the machine is.
RUNS = "digits/mlp/sgdm/seed0", "digits/mlp/llqr-ngd+sam/seed0"
FILES = ["", *(f"{run}/{file}" for run in RUNS for file in ("config.json", "result.json")), f"{RUNS[1]}/analysis.json"]
MOMENTS = [(file, seconds) for file in [*FILES, "report.html"] for seconds in (0.0, 0.05, 0.3)]
COMMAND = ["compare", "digits/mlp", "--methods", "sgdm,llqr+sam", "--seeds", "1", "--device", "cpu"]
HANDLED = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background\n"
PROGRAM = f"""{HANDLED}
import sys
from llqr.__main__ import main

class Begun:
    def find_spec(self, name, path=None, target=None):
        if name == "llqr.lab":  # the first import of the command
            print("started", flush=True)

sys.meta_path.insert(0, Begun())
main()
"""


def start(folder):
    command = [sys.executable, "-c", PROGRAM, *COMMAND, "--out", str(folder), "--set", "training.epochs=3"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "started\n"
    return process


def end(process):
    _, err = process.communicate(timeout=600)
    assert "Traceback" not in err, err
    return process.returncode, err


def complete(folder):
    """Whether all runs and the report are there."""
    return len(list(folder.glob("digits/mlp/*/seed0/result.json"))) == 2 and (folder / "report.html").exists()


@pytest.mark.slow
def test_ctrl_c_at_any_moment(tmp_path):
    codes = []
    for number, (file, seconds) in enumerate(MOMENTS):
        folder = tmp_path / str(number)
        process = start(folder)
        while file and not (folder / file).exists() and process.poll() is None:
            time.sleep(0.001)
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        code, err = end(process)
        codes.append(code)
        if code == 0:
            assert complete(folder), (number, err)  # nothing was left to interrupt
        elif code == 75:
            assert "the same command" in err, (number, err)
            stopped = folder
        else:
            assert code == 130, (number, code, err)
    print(codes)
    assert {75, 130} <= set(codes)
    assert end(start(stopped))[0] == 0
    assert complete(stopped)


def test_ctrl_c_after_the_last_run_leaves_the_report_to_the_same_command(llqr, tmp_path, monkeypatch):
    from llqr.lab.runs.folder import RunFolder

    finish = RunFolder.finish

    def interrupted(folder, result):
        signal.raise_signal(signal.SIGINT)
        return finish(folder, result)

    monkeypatch.setattr(RunFolder, "finish", interrupted)
    arguments = ("compare", "digits/mlp", "--methods", "sgdm", "--seeds", "1", "--set", "training.epochs=1", "--quiet")
    code, out, err = llqr(*arguments)
    sentence = "Stopped by SIGINT after the last run; the same command writes the report."
    assert (code, "sgdm" in out, err) == (75, True, f"llqr: {sentence}\n")
    assert not (tmp_path / "runs/report.html").exists()
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert llqr(*arguments)[0] == 0
    assert (tmp_path / "runs/report.html").exists()

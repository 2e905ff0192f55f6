"""Ctrl-C at any moment of a command, from its first line to the report: an exit code and no traceback."""

import os
import signal
import subprocess
import sys
import time

import pytest

COMMAND = ["compare", "digits/mlp", "--methods", "sgdm,llqr+sam", "--seeds", "1", "--device", "cpu"]
PROGRAM = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test may run in the background, where it is ignored
from llqr.__main__ import main
print("started", flush=True)
main()
"""


def interrupted_after(seconds, folder):
    """Exit code and stderr of a command that gets SIGINT so long after its first line; None if it was done before."""
    command = [sys.executable, "-c", PROGRAM, *COMMAND, "--out", str(folder), "--set", "training.epochs=3"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "started\n"
    time.sleep(seconds)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=300)
    return process.returncode, err


@pytest.mark.slow
def test_ctrl_c_at_any_moment(tmp_path):
    started = time.perf_counter()
    whole = [sys.executable, "-c", PROGRAM, *COMMAND, "--out", str(tmp_path / "whole"), "--set", "training.epochs=3"]
    subprocess.run(whole, check=True, capture_output=True)
    length = time.perf_counter() - started
    codes = []
    for number in range(20):
        code, err = interrupted_after(length * number / 20, tmp_path / str(number))
        codes.append(code)
        assert code in (0, 75, 130), (number, code, err)
        assert "Traceback" not in err, err
    print(codes)
    assert {75, 130} <= set(codes)

"""A training by the command line, killed at random moments and started again, ends as if it had been left alone."""

import os
import random
import time

import pytest

from counts import show
from resumed_runs import assert_same_end, folder_of, start

KILLS = int(os.environ.get("LLQR_KILLS", 50))


def finished(process):
    """Whether it has ended by itself; what goes wrong is shown."""
    if process.poll() is None:
        return False
    assert process.returncode == 0, process.stderr.read().decode()
    return True


def trains(process, out):
    """Waits until the process has written a checkpoint of its own; False if it ended before."""
    checkpoint = folder_of(out) / "checkpoint.pt"
    before = checkpoint.stat().st_mtime_ns if checkpoint.exists() else None
    while not finished(process):
        if checkpoint.exists() and checkpoint.stat().st_mtime_ns != before:
            return True
        time.sleep(0.002)
    return False


def kill(process):
    process.kill()
    process.communicate()


@pytest.mark.slow
def test_kills(tmp_path, record_property):
    """`LLQR_KILLS` of them, 50 by default: one in five while the process starts, the others while it trains."""
    process = start(tmp_path / "whole")
    begun = time.monotonic()
    assert trains(process, tmp_path / "whole")
    starting = time.monotonic() - begun
    process.wait()
    assert finished(process)
    training = time.monotonic() - begun - starting

    draw = random.Random(0)
    counts = {"kills": 0, "of them while training": 0, "runs": 0, "runs that differ": 0}
    while counts["kills"] < KILLS:
        out = tmp_path / f"run{counts['runs']}"
        while True:
            process, training_now = start(out), False
            if counts["kills"] == KILLS:
                process.wait()
            elif draw.random() < 0.2:
                time.sleep(draw.uniform(0, starting))
            elif trains(process, out):
                training_now = True
                time.sleep(draw.uniform(0, training / 3))
            if finished(process):
                break
            kill(process)
            counts["kills"] += 1
            counts["of them while training"] += training_now
        assert_same_end(folder_of(tmp_path / "whole"), folder_of(out))
        counts["runs"] += 1
    show("SIGKILLs", counts, record_property)

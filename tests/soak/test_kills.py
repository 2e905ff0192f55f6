"""A training by the command line, killed at random moments and started again, ends as if it had been left alone."""

import os
import random
import subprocess
import time

import pytest

from counts import show
from resumed_runs import assert_same_end, folder_of, start

KILLS = int(os.environ.get("LLQR_KILLS", 50))


def finished(process, seconds=None):
    """Whether it ends by itself, in so many seconds; otherwise it is killed."""
    try:
        message = process.communicate(timeout=seconds)[1].decode()
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return False
    assert process.returncode == 0, message
    return True


@pytest.mark.slow
def test_kills(tmp_path, record_property):
    """`LLQR_KILLS` of them, 50 by default. Until a run is finished, it is started again and, perhaps, killed again."""
    before = time.monotonic()
    assert finished(start(tmp_path / "whole"))
    longest = time.monotonic() - before
    draw = random.Random(0)
    counts = {"kills": 0, "of them before the first checkpoint": 0, "runs": 0}
    while counts["kills"] < KILLS:
        out = tmp_path / f"run{counts['runs']}"
        while not finished(start(out), draw.uniform(0, longest) if counts["kills"] < KILLS else None):
            counts["kills"] += 1
            counts["of them before the first checkpoint"] += not (folder_of(out) / "checkpoint.pt").exists()
        assert_same_end(folder_of(tmp_path / "whole"), folder_of(out))
        counts["runs"] += 1
    show("SIGKILLs", counts | {"runs that differ": 0}, record_property)

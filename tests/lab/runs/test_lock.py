"""Two commands on one run: the second one is told so, and a lock does not outlive its process."""

import os
import subprocess
import sys

import pytest

from llqr.lab.config.strict import ConfigurationError
from llqr.lab.runs.folder import RunFolder

HOLD = """
import os, sys
from pathlib import Path
from llqr.lab.runs.folder import RunFolder
with RunFolder(Path(sys.argv[1])).locked():
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_run_in_use_is_refused_until_its_process_is_gone(tmp_path):
    folder = RunFolder(tmp_path / "run")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigurationError, match=rf"^--out: .*run is in use by process {holder.pid} on .*; wait"):
            folder.locked().__enter__()
    finally:
        holder.kill()
        holder.communicate()
    with folder.locked():
        assert str(os.getpid()) in (folder.path / ".lock").read_text()


def test_what_a_killed_process_was_writing_is_removed(tmp_path):
    (tmp_path / ".checkpoint.pt.0123abcd.part").write_text("half")
    with RunFolder(tmp_path).locked():
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]

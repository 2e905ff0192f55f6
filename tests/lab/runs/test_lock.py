"""Two commands on one run: the second one is told so, and a lock does not outlive its process."""

import multiprocessing

import pytest

from forked import METHOD
from llqr.lab.errors import ConfigurationError
from llqr.lab.runs.folder import RunFolder


def hold(path, connection):
    with RunFolder(path).locked():
        connection.send("held")
        connection.recv()


def test_a_run_in_use_is_refused_until_its_process_is_gone(tmp_path):
    folder = RunFolder(tmp_path / "run")
    context = multiprocessing.get_context(METHOD)
    here, there = context.Pipe()
    holder = context.Process(target=hold, args=(folder.path, there))
    holder.start()
    try:
        assert here.recv() == "held"
        with pytest.raises(ConfigurationError, match=r"^--out: .*run is in use by another process; wait"):
            folder.locked().__enter__()
    finally:
        holder.kill()
        holder.join()
    with folder.locked():
        pass


def test_what_a_killed_process_was_writing_is_removed(tmp_path):
    (tmp_path / ".checkpoint.pt.0123abcd.part").write_text("half")
    with RunFolder(tmp_path).locked():
        assert not list(tmp_path.glob("*.part"))

"""Files are replaced whole, under part names that no two writers share, and a failure is one sentence."""

import resource
import threading
from contextlib import contextmanager

import pytest

from llqr.lab.errors import CannotWrite
from llqr.lab.writing import check_file, check_folder, replacing, write_text


@contextmanager
def files_of_at_most(size):
    """As on a disk that is full after so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_two_writers_of_one_file_do_not_disturb_each_other(tmp_path):
    path = tmp_path / "config.json"
    with replacing(path) as one, replacing(path) as other:
        one.write(b"one")
        other.write(b"other")
        assert len(list(tmp_path.glob(".config.json.*.part"))) == 2
    assert path.read_text() == "one"
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.json"]


def test_many_threads_leave_one_whole_file(tmp_path):
    texts = [str(number) * 10_000 for number in range(8)]
    threads = [threading.Thread(target=write_text, args=(tmp_path / "log", text)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "log").read_text() in texts


def test_a_full_disk_leaves_the_old_file_and_no_part(tmp_path):
    path = tmp_path / "result.json"
    write_text(path, "old")
    with files_of_at_most(1000), pytest.raises(CannotWrite, match=r"result.json cannot be written: File too large."):
        write_text(path, "new" * 1000)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]


def test_a_place_that_cannot_be_written_is_found_beforehand(tmp_path):
    check_folder("--out", tmp_path / "new" / "folder")
    check_file("--out", tmp_path / "new" / "file.json")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWrite, match=r"--out: .*/file/runs cannot be written: Not a directory."):
        check_folder("--out", tmp_path / "file" / "runs")
    with pytest.raises(CannotWrite, match=r"--to: .* cannot be written: Is a directory."):
        check_file("--to", tmp_path)
    with files_of_at_most(100), pytest.raises(CannotWrite, match="File too large"):
        check_folder("--out", tmp_path)

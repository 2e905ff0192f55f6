"""A checkpoint is an ordinary file of torch; other files are refused in one sentence."""

import pytest
import torch

from llqr.lab.errors import DataError
from llqr.lab.training import checkpoint

CPU = torch.device("cpu")
STATE = {"weights": torch.arange(100.0), "counts": [1, 2, 3], "name": "run"}


@pytest.fixture
def path(tmp_path):
    checkpoint.save(STATE, tmp_path / "checkpoint.pt")
    return tmp_path / "checkpoint.pt"


def test_it_is_an_ordinary_file_of_torch(path):
    for state in (torch.load(path, weights_only=True), checkpoint.load(path, CPU)):
        assert torch.equal(state["weights"], STATE["weights"])
        assert (state["counts"], state["name"]) == ([1, 2, 3], "run")


def test_one_wrong_byte_is_refused(path):
    content = bytearray(path.read_bytes())
    content[content.index(STATE["weights"].numpy().tobytes()) + 7] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"is not a readable checkpoint \(its part .*data/0 is damaged"):
        checkpoint.load(path, CPU)


@pytest.mark.parametrize("content", [b"", b"x", b"garbage\n" * 50, b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.", None])
def test_other_files_are_refused(path, content):
    path.write_bytes(path.read_bytes()[:-1] if content is None else content)
    with pytest.raises(DataError, match="is not a readable checkpoint"):
        checkpoint.load(path, CPU)

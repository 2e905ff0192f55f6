"""Files that somebody made to harm: none runs code, leaves its folder, hangs, or takes more memory than its size."""

import gzip
import json
import os
import pickle
import struct
import zipfile
import zlib

import pytest
import torch

from fake_runs import write_run
from llqr.lab.cli.app import main
from llqr.lab.config import recipe
from llqr.lab.data.readers import decode
from llqr.lab.errors import ConfigurationError, DataError
from llqr.lab.runs import stored
from llqr.lab.runs.folder import RunFolder
from llqr.lab.text.corpus import read_lines
from llqr.lab.training import checkpoint

CPU = torch.device("cpu")


def command(capsys, *arguments):
    """The exit code of a command, and what it says on stderr."""
    with pytest.raises(SystemExit) as exit_:
        main(list(arguments))
    return exit_.value.code, capsys.readouterr().err


# -- run folders -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [".lock", "log.jsonl", "checkpoint.pt", "tensorboard"])
def test_a_run_follows_no_link(tmp_path, name):
    elsewhere, run = tmp_path / "elsewhere", tmp_path / "run"
    elsewhere.write_text("mine")
    run.mkdir()
    (run / name).symlink_to(elsewhere)
    with pytest.raises(ConfigurationError, match=rf"^--out: .*{name} is a link, which a run does not follow"):
        RunFolder(run).locked().__enter__()
    assert elsewhere.read_text() == "mine"


@pytest.mark.parametrize("name", ["config.json", "result.json", "log.jsonl"])
def test_a_pipe_in_a_run_folder(tmp_path, name):
    folder = write_run(tmp_path, "sam", 0)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(DataError, match=rf"{name} is not a file"):
        stored.read(folder)


def test_what_a_file_says_does_not_control_the_terminal(tmp_path, capsys):
    folder = write_run(tmp_path, "sam", 0)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"recipe": "\x1b[2Jdigits"}))
    code, err = command(capsys, "report", str(tmp_path), "--samples", "0")
    assert (code, "config.json is damaged: recipe has control characters" in err) == (3, True)
    code, err = command(capsys, "report", str(tmp_path / "\x1b[2J"))
    assert (code, "\x1b" in err, "\\x1b[2J is not there" in err) == (3, False, True)


# -- recipes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["a = " + "[" * 3000 + "]" * 3000, "a" + ".a" * 5000 + " = 1"])
def test_tables_that_are_nested_too_deeply(tmp_path, text):
    (tmp_path / "deep.toml").write_text(text)
    with pytest.raises(ConfigurationError, match="recursion"):
        recipe.load(tmp_path / "deep.toml")
    with pytest.raises(ConfigurationError, match=r"^--set: a is nested too deeply"):
        recipe.load("digits/mlp", [text.replace(" ", "")])


def test_numbers_without_end(capsys):
    nines = "9" * 400
    with pytest.raises(ConfigurationError, match=r"bases.sgdm.lr must be a number"):
        recipe.load("digits/mlp", [f"bases.sgdm.lr={nines}"])
    code, err = command(capsys, "compare", "digits/mlp", "--seeds", nines)
    assert (code, "'--seeds'" in err) == (2, True)


def test_escape_codes_in_a_title(tmp_path):
    (tmp_path / "red.toml").write_text('extends = "digits/mlp"\ntitle = "\\u001b[31mred"\n')
    with pytest.raises(ConfigurationError, match="title and caveat may not have control characters"):
        recipe.load(tmp_path / "red.toml")


# -- checkpoints -------------------------------------------------------------------------------------------------------


class Bytes:
    def __reduce__(self):
        return bytearray, (2**33,)


class Code:
    def __reduce__(self):
        return os.mkdir, ("harmed",)


def doubled(levels=60):
    value = [1]
    for _ in range(levels):
        value = [value, value]
    return value


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (doubled(), "holds the same tables many times over"),
        (Bytes(), "holds a bytearray"),
        (Code(), "Weights only load failed"),
    ],
)
def test_pickles(tmp_path, monkeypatch, state, reason):
    monkeypatch.chdir(tmp_path)
    torch.save({"log": state}, tmp_path / "checkpoint.pt")
    with pytest.raises(DataError, match=rf"is not a readable checkpoint \(.*{reason}"):
        checkpoint.load(tmp_path / "checkpoint.pt", CPU)
    assert not (tmp_path / "harmed").exists()


def test_a_checkpoint_that_unpacks_to_more_than_its_size(tmp_path):
    """Compressed zeros, where torch stores tensors as they are."""
    torch.save({"weights": torch.zeros(2**20)}, tmp_path / "stored.pt")
    packed = zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(tmp_path / "stored.pt") as archive, packed:
        for name in archive.namelist():
            packed.writestr(name, archive.read(name))
    assert torch.load(tmp_path / "packed.pt", weights_only=True)["weights"].numel() == 2**20  # torch unpacks it
    with pytest.raises(DataError, match="its parts are longer than the file"):
        checkpoint.load(tmp_path / "packed.pt", CPU)


def test_a_bare_pickle(tmp_path):
    (tmp_path / "checkpoint.pt").write_bytes(pickle.dumps({"log": 1}, protocol=2))
    with pytest.raises(DataError, match="is not a readable checkpoint"):
        checkpoint.load(tmp_path / "checkpoint.pt", CPU)


# -- data --------------------------------------------------------------------------------------------------------------


def chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [12_000, 60_000])  # above the first and the second limit of Pillow
def test_an_image_bomb(tmp_path, side):
    head = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
    (tmp_path / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + parts)
    with pytest.raises(DataError, match=r"bomb.png is not a readable image: .* pixels"):
        decode(tmp_path / "bomb.png")


def test_a_pipe_is_no_image(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(DataError, match=r"pipe.png is not a readable image: it is not a file"):
        decode(tmp_path / "pipe.png")


def test_compressed_text_that_fills_the_memory(tmp_path):
    with gzip.open(tmp_path / "train.de.gz", "wb") as file:
        file.write(bytes(2**25))
    with pytest.raises(ValueError, match=r"train.de.gz is damaged: it is more than 100 times as long as its file"):
        read_lines(tmp_path / "train.de.gz")


# -- experiments -------------------------------------------------------------------------------------------------------

EXPERIMENT = """import sys, torch
from torch import nn
from llqr.lab import Experiment
print("imported")
class Loud(nn.Linear):
    def forward(self, x):
        print("called")
        return super().forward(x)
def experiment():
    x, y = torch.randn(16, 4), torch.randint(3, (16,))
    return Experiment(model=Loud(4, 3), loss=nn.functional.cross_entropy, train=(x, y), test=(x, y), epochs=1)
"""
OPTIONS = ("--methods", "sgdm", "--seeds", "1", "--device", "cpu", "--quiet", "--json")


def test_an_experiment_that_prints_leaves_the_results_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loud.py").write_text(EXPERIMENT)
    with pytest.raises(SystemExit) as exit_:
        main(["compare", "loud.py", *OPTIONS])
    out, err = capsys.readouterr()
    assert (exit_.value.code, len(json.loads(out)["runs"])) == (0, 1)
    assert {"imported", "called"} <= set(err.splitlines())


@pytest.mark.parametrize("where", ["print(", "    x, y = ", '        print("called")'])
def test_an_experiment_that_exits_is_not_done(tmp_path, monkeypatch, capsys, where):
    monkeypatch.chdir(tmp_path)
    indent = where[: len(where) - len(where.lstrip())]
    (tmp_path / "gone.py").write_text(EXPERIMENT.replace(where, f"{indent}sys.exit(0)\n{where}", 1))
    code, err = command(capsys, "compare", "gone.py", *OPTIONS)
    assert (code, "the experiment called sys.exit(0) before it was done" in err) == (2, True)

"""`llqr data`: what it prints, what it refuses, and how it ends."""

import json
import lzma
import tarfile

import pytest
from typer.testing import CliRunner

from llqr.lab.cli import data as cli_data
from llqr.lab.config.strict import ConfigurationError
from llqr.lab.errors import DataError
from llqr.lab.text import parallel_text, token_stream
from parallel_text import write_folder


@pytest.fixture
def run(tmp_path):
    """The command, in a command line of its own, with a small vocabulary; gives what it printed."""

    def call(*arguments):
        words = [*map(str, arguments), "--data-dir", str(tmp_path / "data"), "--quiet", "--merges", "50"]
        result = CliRunner().invoke(cli_data.app, words)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return call


@pytest.fixture
def source(tmp_path):
    return write_folder(tmp_path / "raw")


def test_a_folder_is_prepared_and_told_of(run, source, tmp_path):
    result = run("mine", "--source", source)
    assert result.exit_code == 0, result.output
    text = parallel_text.load(tmp_path / "data" / "mine")
    assert len(text.train) == 300
    rows = {line.strip().rpartition("  ")[0].split("  ")[0]: line.split()[-3:] for line in result.output.splitlines()}
    assert rows["read"] == ["300", "20", "20"]
    assert rows["dropped: not UTF-8"] == ["0", "0", "0"]
    assert "prepared in" in result.output
    assert f"{text.vocabulary.tokens} tokens in the vocabulary" in result.output
    assert "prepared before" in run("mine", "--source", source).output


def test_files_are_prepared_and_told_of_in_json(run, source, tmp_path):
    packed = tmp_path / "a.en.xz"
    packed.write_bytes(lzma.compress((source / "train.en").read_bytes()))
    result = run("pairs", "--train", packed, source / "train.de", "--no-lowercase", "--json")
    told = json.loads(result.output)
    assert told["prepared_now"] is True
    assert told["settings"]["languages"] == ["en", "de"]
    assert told["counts"]["train"]["held_out"] == told["counts"]["valid"]["kept"] + told["counts"]["test"]["kept"] > 0
    assert parallel_text.load(told["folder"]).key == told["key"]


def test_one_text_is_prepared(run, source, tmp_path):
    result = run("novel", "--text", source / "train.en", "--held-out", "0.1")
    assert result.exit_code == 0, result.output
    assert token_stream.load(tmp_path / "data" / "novel").counts["valid"]["kept"] == 30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Exactly one of --source, --train and --text must be given"),
        (["--source", "a", "--text", "b"], "Exactly one of --source, --train and --text must be given"),
        (["--source", "a", "--valid", "b", "c"], "--valid and --test go with --train"),
        (["--source", "a", "--ratio", "0.5"], "--ratio must be at least 1, got 0.5"),
        (["--text", "a", "--held-out", "2"], "--held-out must lie between 0 and 0.5"),
    ],
)
def test_bad_arguments_are_refused(run, arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        run("x", *arguments)


def test_a_name_is_not_a_path(run, source):
    with pytest.raises(ConfigurationError, match=r"NAME must consist of letters.*got '\.\./x'"):
        run("../x", "--source", source)


def test_bad_data_is_refused(run, source, tmp_path):
    with pytest.raises(DataError, match="nowhere does not exist"):
        run("x", "--source", tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"gone\.de is not a file"):
        run("x", "--train", tmp_path / "gone.de", source / "train.en")
    (source / "valid.en").write_text("one line\n")
    with pytest.raises(DataError, match="valid are not aligned: 20 lines in the source and 1 in the target"):
        run("x", "--source", source)
    assert not (tmp_path / "data" / "x").exists()


@pytest.mark.parametrize(
    ("name", "content"), [("a.tgz", b"no archive"), ("a.tgz", b"\x1f\x8b\x08\x00broken"), ("a.xz", b"x")]
)
def test_a_damaged_archive_is_refused(run, tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"--(source|text) .*{name}: "):
        run("x", "--source" if name.endswith("tgz") else "--text", tmp_path / name)


def test_an_archive_that_was_cut_off_is_refused(run, source, tmp_path):
    with tarfile.open(tmp_path / "whole.tgz", "w:gz") as archive:
        archive.add(source, arcname="de-en")
    for kept in (0.1, 0.5, 0.9):
        content = (tmp_path / "whole.tgz").read_bytes()
        (tmp_path / "cut.tgz").write_bytes(content[: int(kept * len(content))])
        with pytest.raises(DataError, match=r"--source .*cut.tgz: "):
            run("x", "--source", tmp_path / "cut.tgz")

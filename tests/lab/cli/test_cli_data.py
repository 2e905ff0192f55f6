"""`llqr data`: what it prints, what it refuses, and how it ends."""

import json

import pytest
from typer.testing import CliRunner

from llqr.lab.cli import data as cli_data
from llqr.lab.config.strict import ConfigurationError
from llqr.lab.errors import DataError
from llqr.lab.text.prepared import ParallelText, TokenStream
from parallel_text import write_folder


@pytest.fixture
def run(tmp_path):
    """The command, in a command line of its own, with a small vocabulary; gives what it printed."""

    def call(*arguments):
        words = [*map(str, arguments), "--data-dir", str(tmp_path / "data"), "--merges", "50"]
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
    text = ParallelText.load(tmp_path / "data" / "mine")
    assert len(text.train) == 300
    rows = {line.strip().rpartition("  ")[0].split("  ")[0]: line.split()[-3:] for line in result.output.splitlines()}
    assert rows["read"] == ["300", "20", "20"]
    assert rows["dropped: not UTF-8"] == ["0", "0", "0"]
    assert "prepared now" in result.output
    assert f"{text.subwords.tokens} tokens in the vocabulary" in result.output
    assert "prepared before" in run("mine", "--source", source).output


def test_counts_are_told_in_json(run, source):
    for name in ("valid.de", "valid.en", "test.de", "test.en"):
        (source / name).unlink()
    result = run("pairs", "--source", source, "--languages", "en", "de", "--no-lowercase", "--json")
    told = json.loads(result.output)
    assert told["prepared_now"] is True
    assert told["settings"]["languages"] == ["en", "de"]
    assert told["counts"]["train"]["held_out"] == told["counts"]["valid"]["kept"] + told["counts"]["test"]["kept"] > 0
    assert ParallelText.load(told["file"].removesuffix(".pt")).key == told["key"]


def test_one_text_is_prepared(run, source, tmp_path):
    result = run("novel", "--text", source / "train.en", "--held-out", "0.1")
    assert result.exit_code == 0, result.output
    assert TokenStream.load(tmp_path / "data" / "novel").counts["valid"]["kept"] == 30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Exactly one of --source and --text must be given"),
        (["--source", "a", "--text", "b"], "Exactly one of --source and --text must be given"),
        (["--source", "a", "--languages", "de", "de"], "--languages must be two different languages"),
    ],
)
def test_bad_arguments_are_refused(run, arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        run("x", *arguments)


def test_bad_numbers_are_refused(run):
    for option, value in (("--ratio", "0.5"), ("--held-out", "2"), ("--valid-every", "2")):
        result = run("x", "--source", "a", option, value)
        assert result.exit_code == 2
        assert option in result.output


def test_a_name_is_not_a_path(run, source):
    with pytest.raises(ConfigurationError, match=r"NAME must consist of letters.*got '\.\./x'"):
        run("../x", "--source", source)


def test_bad_data_is_refused(run, source, tmp_path):
    with pytest.raises(DataError, match=r"--source .*nowhere: source must be a folder"):
        run("x", "--source", tmp_path / "nowhere")
    (tmp_path / "a.xz").write_bytes(b"x")
    with pytest.raises(DataError, match=r"--text .*a\.xz: .*a\.xz is damaged"):
        run("x", "--text", tmp_path / "a.xz")
    (source / "valid.en").write_text("one line\n")
    with pytest.raises(DataError, match="valid are not aligned: 20 lines in the source and 1 in the target"):
        run("x", "--source", source)
    assert not (tmp_path / "data" / "x.pt").exists()

"""`llqr data`: what it prints, what it refuses, and how it ends."""

import pytest
from typer.testing import CliRunner

from llqr.lab.cli import data as cli_data
from llqr.lab.config.strict import ConfigurationError
from llqr.lab.errors import DataError
from llqr.lab.text.prepared import ParallelText
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
    assert result.output.startswith("train: 300 pairs read, 300 kept\nvalid: 20 pairs read, 20 kept\n")
    assert "prepared now" in result.output
    assert f"{text.subwords.tokens} tokens in the vocabulary" in result.output
    assert "prepared before" in run("mine", "--source", source).output


def test_the_other_direction_in_upper_and_lower_case(run, source, tmp_path):
    run("pairs", "--source", source, "--languages", "en", "de", "--no-lowercase")
    text = ParallelText.load(tmp_path / "data" / "pairs")
    assert (text.settings["languages"], text.settings["lowercase"]) == (("en", "de"), False)


def test_two_equal_languages_are_refused(run):
    with pytest.raises(ConfigurationError, match="--languages must be two different languages"):
        run("x", "--source", "a", "--languages", "de", "de")


def test_a_name_is_not_a_path(run, source):
    with pytest.raises(ConfigurationError, match=r"NAME must consist of letters.*got '\.\./x'"):
        run("../x", "--source", source)


def test_bad_data_is_refused(run, source, tmp_path):
    with pytest.raises(DataError, match=r"--source .*nowhere: source must be a folder"):
        run("x", "--source", tmp_path / "nowhere")
    (source / "valid.en").write_text("one line\n")
    with pytest.raises(DataError, match="valid are not aligned: 20 lines in the source and 1 in the target"):
        run("x", "--source", source)
    assert not (tmp_path / "data" / "x.pt").exists()

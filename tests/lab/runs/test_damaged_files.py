"""Damaged run files: an error names the file and the key that is missing."""

import json
import shutil

import pytest

from fake_runs import write_analysis, write_run
from llqr.lab.cli.app import main
from llqr.lab.errors import DataError
from llqr.lab.runs import json_files, stored

FILES = {"config.json": json_files.CONFIG, "result.json": json_files.RESULT, "analysis.json": json_files.ANALYSIS}


@pytest.fixture
def run(tmp_path):
    folder = write_run(tmp_path, "llqr-ngd+sam", 0)
    write_analysis(folder, 2.0, 1.0)
    stored.read(folder)
    return folder


@pytest.mark.parametrize("name", [*FILES, "log.jsonl"])
@pytest.mark.parametrize("content", ["{}", "[]", "null", '"x"', "{", "\x00"])
def test_other_json_is_refused(run, name, content):
    (run / name).write_text(content + "\n")
    with pytest.raises(DataError, match=rf"{name}.* is damaged: "):
        stored.read(run)


@pytest.mark.parametrize("name", FILES)
def test_every_missing_key_is_named(run, name):
    whole = (run / name).read_text()
    for key in FILES[name]:
        damaged = table = json.loads(whole)
        *outer, last = key.split(".")
        for part in outer:
            table = table[part]
        del table[last]
        (run / name).write_text(json.dumps(damaged))
        with pytest.raises(DataError, match=rf"{name} is damaged: {key} is missing"):
            stored.read(run)


def test_the_report_names_the_file_without_a_traceback(run, tmp_path, capsys):
    (run / "config.json").write_text("{}")
    with pytest.raises(SystemExit) as exit_:
        main(["report", str(tmp_path), "--samples", "0"])
    err = capsys.readouterr().err
    assert (exit_.value.code, err.count("\n")) == (3, 1)
    assert "config.json is damaged: " in err


def test_a_line_of_results_without_its_parts_is_named(run, tmp_path, capsys):
    shutil.rmtree(run)
    (tmp_path / "digits.jsonl").write_text('{"kind": "run"}\n')
    with pytest.raises(SystemExit) as exit_:
        main(["table", "digits", "--results", str(tmp_path)])
    assert exit_.value.code == 3
    assert "digits.jsonl, line 1 is damaged: recipe is missing." in capsys.readouterr().err


@pytest.mark.parametrize("name", FILES)
def test_every_value_of_another_kind_is_named(run, name):
    whole = (run / name).read_text()
    for key in FILES[name]:
        damaged = table = json.loads(whole)
        *outer, last = key.split(".")
        for part in outer:
            table = table[part]
        table[last] = {"x": []} if isinstance(table[last], list) else [1]
        (run / name).write_text(json.dumps(damaged))
        with pytest.raises(DataError, match=rf"{name} is damaged: {key} is [\"']"):
            stored.read(run)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("log.jsonl", lambda record: record.pop("test")),
        ("log.jsonl", lambda record: record["refreshes"].append("x")),
        ("result.json", lambda result: result.pop("rate")),
        ("result.json", lambda result: result["test"].update(loss=[])),
    ],
)
def test_what_the_report_alone_needs(run, tmp_path, name, change, capsys):
    first, *_ = (run / name).read_text().splitlines()
    table = json.loads(first)
    change(table)
    (run / name).write_text(json.dumps(table) + "\n")
    with pytest.raises(SystemExit) as exit_:
        main(["report", str(tmp_path), "--samples", "0"])
    err = capsys.readouterr().err
    assert (exit_.value.code, err.count("\n")) == (3, 1)
    assert "RUNS: a log, result or analysis is damaged (" in err

"""Run files whose content was damaged: the file is named in one sentence, whichever key is gone."""

import json
import shutil

import pytest

from fake_runs import write_analysis, write_run
from llqr.lab.cli.app import main
from llqr.lab.errors import DataError
from llqr.lab.runs import shapes, stored


@pytest.fixture
def run(tmp_path):
    folder = write_run(tmp_path, "llqr-ngd+sam", 0)
    write_analysis(folder, 2.0, 1.0)
    stored.read(folder)
    return folder


def keys_of(shape, prefix=()):
    for name, kind in shape.items():
        yield (*prefix, name)
        if isinstance(kind, dict):
            yield from keys_of(kind, (*prefix, name))


FILES = {"config.json": shapes.CONFIG, "result.json": shapes.RESULT, "analysis.json": shapes.ANALYSIS}


@pytest.mark.parametrize("name", [*FILES, "log.jsonl"])
@pytest.mark.parametrize("content", ["{}", "[]", "null", "1", '"x"', "", "{", "\x00", "[" * 100_000])
def test_other_json_is_refused(run, name, content):
    if name == "log.jsonl" and content == "":
        pytest.skip("an empty log is one")
    (run / name).write_text(content + "\n" if content else "")
    with pytest.raises(DataError, match=rf"{name}.* is damaged: "):
        stored.read(run)


@pytest.mark.parametrize("name", FILES)
def test_every_key_that_is_missing_or_of_another_kind_is_named(run, name):
    whole = json.loads((run / name).read_text())
    for *outer, last in keys_of(FILES[name]):
        for change in ("missing", "cannot be", "expected a table"):
            damaged = json.loads(json.dumps(whole))
            table = damaged
            for key in outer:
                table = table[key]
            if change == "missing":
                del table[last]
            elif isinstance(table[last], dict) == (change == "expected a table"):
                table[last] = ["damaged"] if not isinstance(table[last], list) else "damaged"
            else:
                continue
            (run / name).write_text(json.dumps(damaged))
            path = ".".join([*outer, last])
            with pytest.raises(DataError, match=rf"{name} is damaged: .*{path}.*") as caught:
                stored.read(run)
            assert change in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "result.json", "analysis.json"])
def test_the_report_names_the_file_and_leaves_without_a_traceback(run, tmp_path, name, capsys):
    (run / name).write_text("{}")
    with pytest.raises(SystemExit) as exit_:
        main(["report", str(tmp_path), "--samples", "0"])
    err = capsys.readouterr().err
    assert (exit_.value.code, err.count("\n")) == (3, 1)
    assert f"{name} is damaged: " in err


def test_a_line_of_results_without_its_parts_is_named(run, tmp_path, capsys):
    shutil.rmtree(run)
    (tmp_path / "digits.jsonl").write_text('{"kind": "run"}\n')
    with pytest.raises(SystemExit) as exit_:
        main(["table", "digits", "--results", str(tmp_path)])
    assert exit_.value.code == 3
    assert "digits.jsonl, line 1 is damaged: recipe is missing." in capsys.readouterr().err

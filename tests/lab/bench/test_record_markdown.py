"""Recorded measurements on a page: the rows asked for, and where they come from."""

import json

import pytest

from llqr.lab.bench.record import markdown
from llqr.lab.config.strict import ConfigurationError


@pytest.fixture
def file(tmp_path):
    rows = [
        {"model": model, "what": "SAM", "structure": None, "peak_bytes": size, "metric_bytes": 0, "vs_sam": 1.0}
        for model, size in (("vit-b", 3 * 2**20), ("vit-l", 5 * 2**20))
    ]
    record = {
        "bench": "memory",
        "command": "llqr bench memory",
        "versions": {"torch": "2.11.0"},
        "machine": {"gpu": "NVIDIA H200", "cpus": 16},
        "complete": True,
        "rows": rows,
    }
    path = tmp_path / "memory.json"
    path.write_text(json.dumps(record))
    return path


def test_the_table_of_the_command_with_its_source(file):
    lines = markdown(file).splitlines()
    assert lines[0] == "| model | what | structure | peak MiB | U MiB | vs SAM step |"
    assert lines[1] == "| :-- | :-- | :-- | --: | --: | --: |"
    assert lines[2:4] == ["| vit-b | SAM | - | 3.0 | 0.0 | 1.000 |", "| vit-l | SAM | - | 5.0 | 0.0 | 1.000 |"]
    assert lines[-1] == "`llqr bench memory` on NVIDIA H200, torch 2.11.0."


@pytest.mark.parametrize(("dirty", "told"), [(False, "commit 0123456789ab."), (True, "commit 0123456789ab, changed.")])
def test_a_known_commit_is_named(file, dirty, told):
    file.write_text(json.dumps(json.loads(file.read_text()) | {"commit": "0123456789abcdef", "dirty": dirty}))
    assert markdown(file).endswith(f"torch 2.11.0, {told}")


def test_rows_are_chosen_by_value_and_those_without_the_key_stay(file):
    assert "vit-b" not in markdown(file, ["model=vit-l"])
    assert "vit-b" in markdown(file, ["structure=e-kfac"])


def test_a_measurement_that_was_cut_short_is_not_shown(file):
    file.write_text(json.dumps(json.loads(file.read_text()) | {"complete": False}))
    with pytest.raises(ConfigurationError, match="table:bench/memory: the command was interrupted"):
        markdown(file)


@pytest.mark.parametrize(("name", "filters"), [("missing", []), ("memory", ["model=vit-s"])])
def test_missing_files_and_rows_are_reported(file, name, filters):
    with pytest.raises(ConfigurationError, match=f"table:bench/{name}"):
        markdown(file.with_name(f"{name}.json"), filters)

"""Recorded measurements: which command, commit and machine made them, and their table on a page."""

import json
import shlex
from pathlib import Path

import pytest

from llqr.lab.bench.record import markdown
from llqr.lab.config.strict import ConfigurationError

KEPT = Path(__file__).parents[3] / "results" / "bench"


@pytest.mark.parametrize("file", sorted(KEPT.glob("*.json")), ids=lambda file: file.stem)
def test_a_kept_measurement_names_itself_and_its_commit(file):
    record = json.loads(file.read_text())
    words = shlex.split(record["command"])
    assert words[:3] == ["llqr", "bench", record["bench"]]
    assert Path(words[words.index("--out") + 1]).name == file.name
    assert "commit" in record


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


def change(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_the_table_of_the_command_with_its_source(file):
    lines = markdown(file).splitlines()
    assert lines[0] == "| model | what | structure | peak MiB | U MiB | vs SAM step |"
    assert lines[1] == "| :-- | :-- | :-- | --: | --: | --: |"
    assert lines[2:4] == ["| vit-b | SAM | - | 3.0 | 0.0 | 1.000 |", "| vit-l | SAM | - | 5.0 | 0.0 | 1.000 |"]
    assert lines[-1] == "`llqr bench memory` on NVIDIA H200, torch 2.11.0."


@pytest.mark.parametrize(("dirty", "told"), [(False, "commit 0123456789ab."), (True, "commit 0123456789ab, changed.")])
def test_a_known_commit_is_named(file, dirty, told):
    change(file, commit="0123456789abcdef", dirty=dirty)
    assert markdown(file).endswith(f"torch 2.11.0, {told}")


def test_rows_are_chosen_by_value_and_those_without_the_key_stay(file):
    assert "vit-b" not in markdown(file, ["model=vit-l"])
    assert "vit-b" in markdown(file, ["structure=e-kfac"])
    with pytest.raises(ConfigurationError, match="no row matches model=vit-s"):
        markdown(file, ["model=vit-s"])


@pytest.mark.parametrize(
    ("changes", "said"), [({"complete": False}, "was interrupted"), ({"bench": "solvers"}, "no `llqr bench solvers`")]
)
def test_a_record_that_no_command_completed_is_refused(file, changes, said):
    change(file, **changes)
    with pytest.raises(ConfigurationError, match=said):
        markdown(file)


@pytest.mark.parametrize("content", ["{}", "[]", "nothing", None])
def test_a_file_that_is_not_a_measurement_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "x.json").write_text(content)
    with pytest.raises(ConfigurationError, match=r"x\.json is not a file that"):
        markdown(tmp_path / "x.json")

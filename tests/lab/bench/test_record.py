"""Every recorded measurement says which command, commit and machine made it."""

import json
import shlex
from pathlib import Path

import pytest

from llqr.lab.bench.record import KEPT, command_for

FILES = sorted((Path(__file__).parents[3] / KEPT).glob("*.json"))


def test_measurements_are_kept():
    assert FILES


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_kept_measurement_names_itself_and_its_commit(file):
    record = json.loads(file.read_text())
    words = shlex.split(record["command"])
    assert words[:3] == ["llqr", "bench", record["bench"]]
    out = Path(words[words.index("--out") + 1])
    assert out in (Path(file.name), KEPT / file.name)
    assert "commit" in record


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(
    ("folder", "written"), [("repository/results/bench", "results/bench/x.json"), ("elsewhere", "x.json")]
)
def test_a_command_names_a_kept_file_by_its_place_in_the_repository(folder, written, joined, tmp_path):
    out = tmp_path / folder / "x.json"
    arguments = ["bench", "peers", *([f"--out={out}"] if joined else ["--out", str(out)])]
    assert command_for(arguments, out) == f"llqr bench peers --out{'=' if joined else ' '}{written}"


def test_a_relative_place_is_named_too(tmp_path, monkeypatch):
    folder = tmp_path / "results" / "bench"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    assert command_for(["bench", "peers", "--out", "x.json"], Path("x.json")).endswith("--out results/bench/x.json")

"""Recorded measurements name the command and the commit that made them."""

import json
import shlex
from pathlib import Path

import pytest

KEPT = Path(__file__).parents[3] / "results" / "bench"


@pytest.mark.parametrize("file", sorted(KEPT.glob("*.json")), ids=lambda file: file.stem)
def test_a_kept_measurement_names_itself_and_its_commit(file):
    found = json.loads(file.read_text())
    words = shlex.split(found["command"])
    assert words[:3] == ["llqr", "bench", found["bench"]]
    assert Path(words[words.index("--out") + 1]).name == file.name
    assert "commit" in found

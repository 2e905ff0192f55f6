"""Recorded measurements name the command and the commit that made them."""

import json
import shlex
from pathlib import Path

import pytest

from llqr.lab.bench import record
from llqr.lab.errors import ConfigurationError

KEPT = Path(__file__).parents[3] / "results" / "bench"


@pytest.mark.parametrize("file", sorted(KEPT.glob("*.json")), ids=lambda file: file.stem)
def test_a_kept_measurement_names_itself_and_its_commit(file):
    found = json.loads(file.read_text())
    words = shlex.split(found["command"])
    assert words[:3] == ["llqr", "bench", found["bench"]]
    assert Path(words[words.index("--out") + 1]).name == file.name
    assert "commit" in found


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "is not a file that"),
        ("{}", "is not a file that"),
        ("[]", "is not a file that"),
        ("nothing", "is not a file that"),
        ('{"complete": false, "bench": "peers"}', "was interrupted"),
        ('{"complete": true, "bench": "solvers"}', "no `llqr bench solvers`"),
    ],
)
def test_a_file_that_no_command_completed_is_refused(tmp_path, content, said):
    if content is not None:
        (tmp_path / "x.json").write_text(content)
    with pytest.raises(ConfigurationError, match=said):
        record.read(tmp_path / "x.json")

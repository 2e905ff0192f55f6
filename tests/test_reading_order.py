"""The docstrings of rooms say what to read first; the modules that they name exist."""

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "llqr"
ROOMS = ["metric", "curvature", "lab/bench", "lab/training"]


@pytest.mark.parametrize("room", ROOMS)
def test_named_modules_exist(room):
    folder = SOURCE / room
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    named = re.findall(r"`([a-z_]+)`", docstring.partition("In reading order:")[2])
    assert len(named) >= 3
    missing = [name for name in named if not any((folder / path).exists() for path in (f"{name}.py", name))]
    assert not missing

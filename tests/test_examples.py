"""Every example runs, in its quick form."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
QUICK = {"digits.py": ["--epochs", "1", "--seeds", "1"], "own_experiment.py": ["1", "1"]}


@pytest.mark.parametrize("script", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_example(script, tmp_path):
    command = [sys.executable, str(EXAMPLES / script), *QUICK.get(script, [])]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()

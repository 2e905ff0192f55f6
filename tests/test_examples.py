"""Every example runs, in its quick form."""

from pathlib import Path

import pytest

import forked

EXAMPLES = Path(__file__).parent.parent / "examples"
QUICK = {"digits.py": ["--epochs", "1", "--seeds", "1"], "own_experiment.py": ["1", "1"]}


LONG = {
    "huggingface_gpt2.py", "accelerate_digits.py", "lightning_digits.py", "pothole.py", "digits.py", "own_experiment.py"
}  # fmt: skip
SCRIPTS = [
    pytest.param(path.name, marks=[pytest.mark.slow] if path.name in LONG else [])
    for path in sorted(EXAMPLES.glob("*.py"))
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_example(script, tmp_path):
    run = forked.run(EXAMPLES / script, *QUICK.get(script, []), folder=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()

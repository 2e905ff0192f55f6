"""The examples of the documentation run as shown."""

import doctest
import importlib
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_page() -> None:
    page = (ROOT / "docs" / "lqr.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) == page.count("```") // 2
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "docs/lqr.md", "exec"), namespace)


@pytest.mark.parametrize("module", ["linearisation", "cost_blocks", "riccati"])
def test_docstrings(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"llqr.lqr.{module}"))
    assert result.attempted
    assert not result.failed


def test_example(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "exact_lqr.py"), run_name="__main__")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    differences = {row[0]: float(row[3]) for row in rows if row and row[0] in {"newton", "gauss-newton", "ngd"}}
    assert len(differences) == 3
    assert max(differences.values()) < 1e-8

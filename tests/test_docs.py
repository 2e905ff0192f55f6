"""The documentation runs: every python block of the pages, every docstring example, every name of the API page."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import llqr

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "docs/guide.md", "docs/theory.md"]


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run_in_order(page):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), flags=re.S | re.M)
    assert blocks
    namespace = {}
    for block in blocks:
        exec(compile(block, page, "exec"), namespace)


def _modules():
    names = [info.name for info in pkgutil.walk_packages(llqr.__path__, "llqr.")]
    return [name for name in names if not name.startswith(("llqr.lab", "llqr.__main__"))]


@pytest.mark.parametrize("name", _modules())
def test_docstring_examples(name):
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


def test_what_is_public_has_an_example():
    """Base classes point to their children's, and an exception or a table speaks for itself."""
    exempt = {"Stacked", "Flat", "RefreshError", "RefreshWarning", "STRUCTURES", "ENGINES", "SOLVERS", "PROBES"}
    bare = [name for name in llqr.__all__ if name not in exempt and ">>>" not in (getattr(llqr, name).__doc__ or "")]
    assert not bare


def test_the_api_page_names_everything_public():
    page = (ROOT / "docs/api.md").read_text()
    missing = [name for name in llqr.__all__ if not re.search(rf"`{name}\b", page)]
    assert not missing

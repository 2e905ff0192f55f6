"""Files that are not in UTF-8: Python files may say so, others are named in one sentence."""

from pathlib import Path

EXPERIMENT = """# -*- coding: latin-1 -*-
import torch
from llqr.lab import Experiment
from beside import TITLE
x, y = torch.ones(8, 4), torch.zeros(8).long()
def experiment():
    loss = torch.nn.functional.cross_entropy
    return Experiment(model=torch.nn.Linear(4, 3), loss=loss, train=(x, y), test=(x, y), title=TITLE)
"""


def test_a_python_file_with_a_declared_encoding(llqr):
    Path("mine.py").write_text(EXPERIMENT, encoding="latin-1")
    Path("beside.py").write_text('# -*- coding: latin-1 -*-\nTITLE = "caf\xe9"\n', encoding="latin-1")
    code, out, _ = llqr("compare", "mine.py", "--dry-run")
    assert (code, out.splitlines()[0]) == (0, "# mine: café")


def test_a_python_file_without_one(llqr):
    Path("mine.py").write_bytes(b"x = 'caf\xe9'\n")
    code, _, err = llqr("compare", "mine.py", "--dry-run")
    assert (code, err.startswith("llqr: mine.py, line "), err.count("\n")) == (2, True, 1)


def test_a_recipe(llqr):
    Path("mine.toml").write_bytes(b'title = "caf\xe9"\n')
    code, _, err = llqr("train", "mine.toml", "--dry-run")
    assert (code, err.startswith("llqr: mine.toml: 'utf-8' codec can't decode"), err.count("\n")) == (2, True, 1)


def test_a_recipe_from_an_editor_on_windows(llqr):
    Path("mine.toml").write_bytes(b'\xef\xbb\xbfextends = "digits/mlp"\r\ntitle = "Mine"\r\n')
    code, out, _ = llqr("train", "mine.toml", "--dry-run")
    assert (code, out.splitlines()[0]) == (0, "# mine: Mine")


def test_a_file_of_results(llqr):
    Path("results").mkdir()
    Path("results/mine.jsonl").write_bytes(b'{"kind": "run", "title": "caf\xe9"}\n')
    code, _, err = llqr("table", "digits")
    assert (code, err.startswith("llqr: mine.jsonl, line 1 is damaged: "), err.count("\n")) == (3, True, 1)

"""Warnings in a command, and from the laboratory as a library: none points into the laboratory."""

import warnings
from pathlib import Path

import pytest
from torch import nn

import llqr as library
from llqr.lab.config import recipe

INSIDE = str(Path(library.__file__).parent / "lab" / "training" / "loop.py")


def test_a_warning_of_llqr_is_a_sentence_in_a_command(llqr, monkeypatch):
    formatted = []

    def rows(shards):
        formatted.extend(warnings.formatwarning("max_side=2", UserWarning, file, 3) for file in (INSIDE, "mine.py"))
        return []

    monkeypatch.setattr("llqr.lab.results.storage.rows", rows)
    before = warnings.formatwarning
    llqr("storage")
    assert formatted == ["llqr: warning: max_side=2\n", "mine.py:3: UserWarning: max_side=2\n"]
    assert warnings.formatwarning is before


def test_in_a_script_it_points_at_the_scripts_own_line():
    settings = recipe.load("digits/mlp", ["geometries.ngd.runtime.max_side=2"]).geometries["ngd"]
    with pytest.warns(UserWarning, match="max_side=2: e-kfac -> ") as told:
        settings.build(nn.Linear(3, 3), nn.functional.cross_entropy)
    assert [warning.filename for warning in told] == [__file__]

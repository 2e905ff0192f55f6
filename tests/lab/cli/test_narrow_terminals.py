"""`llqr recipes` on narrow terminals: whole names, one recipe below the other."""

import pytest

from llqr.lab.config import recipe


@pytest.mark.parametrize("columns", [60, 80])
def test_recipes_are_readable(llqr, monkeypatch, columns):
    monkeypatch.setattr("llqr.lab.cli.catalogue.width", lambda: columns)
    code, out, _ = llqr("recipes")
    assert code == 0
    lines = out.splitlines()
    assert max(map(len, lines)) <= columns
    assert [line for line in lines if not line.startswith(" ")] == recipe.names()
    start = lines.index("digits/mlp")
    assert lines[start + 1].startswith("  Digits / MLP; 3 seeds; sgdm, llqr-ngd, sam, llqr-ngd+sam;")

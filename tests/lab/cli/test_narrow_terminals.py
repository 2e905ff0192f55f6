"""Narrow terminals: names of recipes stay whole, and nothing of a table is cut off."""

import sys
from io import BytesIO, TextIOWrapper

import pytest
from rich.table import Table

from llqr.lab.cli.terminal import show
from llqr.lab.config import recipe
from llqr.lab.progress import Display


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


def test_no_number_of_a_table_is_cut_off(llqr, monkeypatch):
    monkeypatch.setattr("llqr.lab.cli.terminal.width", lambda: 60)
    code, out, _ = llqr("storage")
    assert (code, max(map(len, out.splitlines()))) == (0, 60)
    assert "…" not in out
    first = next(line.split() for line in out.splitlines() if "ViT-L" in line)
    assert first[2:4] == ["1", "304,326,"]  # and "632" below it


def test_brackets_in_a_name_are_shown(capsys):
    show(Table("error [mm]", title="mine [v2]"))
    assert ("error [mm]" in (shown := capsys.readouterr().out), "mine [v2]" in shown) == (True, True)
    with Display() as display:
        display.begin("mine [v2]", 2, 0)
        display.end("mine [v2]: done")
    assert capsys.readouterr().err == "mine [v2]: done\n"


def test_a_terminal_that_cannot_show_a_character_shows_the_others(monkeypatch):
    written = BytesIO()
    monkeypatch.setattr("sys.stdout", TextIOWrapper(written, encoding="ascii"))
    show(Table("1 ± 2"))
    sys.stdout.flush()
    assert b"1 ? 2" in written.getvalue()

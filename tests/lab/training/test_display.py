"""Progress on terminals of any width: how far a run is can be read, whatever else must give way."""

import io

import pytest
from rich.console import Console

from llqr.lab import progress

LABEL = "iwslt14/transformer_iwslt_de_en llqr-newton+fsam seed 0"


@pytest.mark.parametrize("width", [60, 80, 100, 164, 165])
def test_nothing_is_cut(width, monkeypatch):
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr(progress, "Console", lambda **options: console)
    display = progress.Display(3)
    display.begin(LABEL, 50_000, 12_000)
    display.evaluated("step 34567", "BLEU 34.52", 3.1415)
    display.advance(34_567)
    with console.capture() as capture:
        console.print(display._bars.get_renderable())
    words = f"0/3 34567/50000 {LABEL} step 34567: BLEU 34.52, train loss 3.1415".split()
    assert set(words) <= set(capture.get().split())
    assert "…" not in capture.get()


def test_lines_in_a_file_are_not_broken(monkeypatch):
    file = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda **options: Console(file=file, width=80))
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0)
    display = progress.Display()
    display.begin(LABEL, 50_000, 12_000)
    display.evaluated("step 34567", "BLEU 34.52", 3.1415)
    display.end(f"{LABEL}: done, best BLEU 34.52, last 34.02")
    assert file.getvalue() == (
        f"{LABEL}: step 34567: BLEU 34.52, train loss 3.1415\n{LABEL}: done, best BLEU 34.52, last 34.02\n"
    )

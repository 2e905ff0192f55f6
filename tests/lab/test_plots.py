"""Pictures: they show the recorded numbers, follow light and dark, and are refused before anything is measured."""

import json
import re
import runpy
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from llqr.lab import pictures, plots
from llqr.lab.errors import ConfigurationError
from llqr.lab.results import measurements, tables

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "results/bench"
BENCH = SimpleNamespace(**runpy.run_path(str(ROOT / "docs/figures/bench.py")))


def recorded(name):
    return json.loads((RECORDS / f"{name}.json").read_text())


def drawn(name):
    record = recorded(name)
    return BENCH.BENCHES[record["bench"]][0](record["rows"])


def test_the_cadence_figure_shows_ours_beside_the_paper():
    record, figure = recorded("cadence-vit"), drawn("cadence-vit")
    for axes, network in zip(figure.axes, ("vit-b", "vit-l"), strict=True):
        lines = {line.get_label(): line for line in axes.get_lines()}
        rows = [row for row in record["rows"] if row["model"] == network and row["method"] == "LLQR+SAM"]
        assert list(lines["LLQR+SAM, here"].get_ydata()) == [row["vs_sam"]["median"] for row in rows]
        assert list(lines["LLQR+SAM, paper"].get_ydata()) == [row["paper"]["vs_sam"] for row in rows]
        assert list(lines["LLQR+SAM, here"].get_xdata()) == [50, 100, 200, 500, 1000, 1500]
    (axes,) = drawn("cadence-resnet18").axes  # which is not in the paper
    assert [line.get_label() for line in axes.get_lines()] == ["LLQR+SAM, here", "LLQR, here", "SAM"]


def test_the_scaling_figure_has_the_exponent_and_the_paper_s_refreshes():
    (axes,) = drawn("scaling-vit").axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert list(lines) == ["here, LLQR and LLQR+SAM alike", "here, fit: P^0.62", "paper, LLQR", "paper, LLQR+SAM"]
    assert list(lines["paper, LLQR"].get_ydata()) == [38.85, 95.18]
    assert list(lines["paper, LLQR+SAM"].get_ydata()) == [40.58, 96.57]


def test_bars_are_as_long_as_what_was_measured():
    seconds, errors = drawn("refresh-vit-b-few").axes
    assert [round(bar.get_width(), 2) for bar in seconds.patches] == [1.71, 1.05, 0.86]
    assert [round(bar.get_width(), 1) for bar in errors.patches] == [4.7, 4.9, 5.5]
    assert [axes.get_title() for axes in drawn("peers").axes] == ["resnet18", "vit-b"]


def test_refreshes_of_several_networks_are_told_apart_and_refused_ones_left_out():
    rows = [
        {"model": model, "structure": "kfac", "engine": "forward", "seconds": {"median": 1.0}}
        for model in ("vit-b", "vit-l")
    ]
    refused = {"model": "vit-s", "structure": "kfac", "engine": "auto", "refused": "too large"}
    (axes,) = BENCH.refresh([*rows, refused]).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["vit-b, kfac, forward", "vit-l, kfac, forward"]


def test_an_engine_compared_with_itself_is_drawn_without_a_warning():
    rows = [row | {"errors": {"Ug": 0.0}} for row in recorded("refresh-vit-b-few")["rows"][:1]]
    with warnings.catch_warnings(action="error"):
        BENCH.refresh(rows)


def test_an_svg_follows_light_and_dark_and_names_its_source(tmp_path):
    for name in ("x", "y"):
        source = pictures.digest(RECORDS / "cadence-vit.json")
        BENCH.save(recorded("cadence-vit"), tmp_path / f"{name}.svg", source)
    text = (tmp_path / "x.svg").read_text()
    head, style, body = re.split(r"<style>|</style>", text, maxsplit=2)
    assert "<svg" in head
    assert "@media (prefers-color-scheme: dark)" in style
    used = set(re.findall(r"(?:stroke|fill): (#[0-9a-f]{6})", body))
    assert used
    assert used <= pictures.IN_THE_DARK.keys()
    assert f"<dc:source>{source}</dc:source>" in text
    assert "NVIDIA H200, torch 2.11.0" in text
    assert "http" not in re.sub(r"https?://(www\.w3\.org|purl\.org|creativecommons\.org)", "", text)
    assert (tmp_path / "y.svg").read_text() == text


def test_the_pictures_of_the_site_are_those_of_the_measurements():
    """If this fails, run `make figures`."""
    drawn_from = {path.stem: path for path in (ROOT / "docs/figures/bench").glob("*.svg")}
    assert drawn_from
    for name, path in drawn_from.items():
        assert pictures.digest(RECORDS / f"{name}.json") in path.read_text(), name


def test_a_table_is_drawn_with_measured_and_printed_numbers(tmp_path):
    runs = measurements.read(ROOT / "results")
    table = tables.build("cifar100", runs)
    own = table.of_rows(["resnet18"])
    (axes,) = plots.draw_table(own).axes
    printed, measured = (line.get_xdata() for line in axes.get_lines()[:2])
    assert list(printed) == list(own.cells["paper"])
    assert list(measured) == list(own.measured["mean"])
    assert [label.get_text() for label in axes.get_yticklabels()] == list(own.cells["method"])
    for name, built, shown in (("x", table, False), ("y", tables.build("cifar100", []), True)):
        plots.save_table(built, tmp_path / f"{name}.svg")  # rows of the paper alone, where nothing is measured
        assert ("wrn28-10" in (tmp_path / f"{name}.svg").read_text()) is shown


def test_long_names_and_dollar_signs_are_shown(tmp_path):
    row = ", ".join(f"geometry.inner.$setting{number}$={number}" for number in range(6))
    cells = tables._frame([{"row": row, "method": r"$\\frac$", "mean": 1.0, "n": 1}])
    figure = plots.draw_table(tables.PaperTable("own", "accuracy", cells))
    figure.draw_without_rendering()
    box = figure.axes[0].title.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1


def test_a_table_without_runs_is_not_drawn(tmp_path):
    with pytest.raises(ConfigurationError, match="no run counts in digits"):
        plots.save_table(tables.build("digits", []), tmp_path / "x.svg")


def test_the_picture_of_the_site_is_that_of_the_results():
    """If this fails, run `make figures`."""
    table = tables.build("cifar100", measurements.read(ROOT / "results"))
    assert plots.table_digest(table) in (ROOT / "docs/figures/cifar100.svg").read_text()

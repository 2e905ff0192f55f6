"""Pictures of measurements: they show the recorded numbers, follow light and dark, and are refused before measuring."""

import json
import re
import warnings
from pathlib import Path

import pytest

from llqr.lab import pictures
from llqr.lab.bench import plots
from llqr.lab.bench.record import TABLES
from llqr.lab.cli import app as cli
from llqr.lab.config.strict import ConfigurationError

ROOT = Path(__file__).parents[3]
RECORDS = ROOT / "results/bench"
SHOWN = {
    "cadence": "cadence-vit",
    "memory": "memory-vit-b",
    "peers": "peers",
    "refresh": "refresh-vit-b-few",
    "scaling": "scaling-vit",
    "shards": "shards-cpu",
    "solvers": "solvers",
}


def recorded(name):
    return json.loads((RECORDS / f"{name}.json").read_text())


def drawn(name):
    record = recorded(name)
    return plots.DRAWINGS[record["bench"]][0](record["rows"])


def test_every_bench_has_a_picture_and_a_title():
    assert plots.DRAWINGS.keys() == SHOWN.keys() | {"step"} == TABLES.keys()


def test_the_cadence_figure_shows_ours_beside_the_paper():
    record, figure = recorded("cadence-vit"), drawn("cadence-vit")
    for axes, network in zip(figure.axes, ("vit-b", "vit-l"), strict=True):
        lines = {line.get_label(): line for line in axes.get_lines()}
        rows = [row for row in record["rows"] if row["model"] == network and row["method"] == "LLQR+SAM"]
        assert list(lines["LLQR+SAM, here"].get_ydata()) == [row["vs_sam"]["median"] for row in rows]
        assert list(lines["LLQR+SAM, paper"].get_ydata()) == [row["paper"]["vs_sam"] for row in rows]
        assert list(lines["LLQR+SAM, here"].get_xdata()) == [50, 100, 200, 500, 1000, 1500]


def test_a_network_that_is_not_in_the_paper_has_no_line_of_it():
    (axes,) = drawn("cadence-resnet18").axes
    assert [line.get_label() for line in axes.get_lines()] == ["LLQR+SAM, here", "LLQR, here", "SAM"]


def test_the_scaling_figure_has_both_exponents_and_the_paper_s_refreshes():
    (axes,) = drawn("scaling-vit").axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert list(lines) == ["here", "here, fit: P^0.62", "paper, cadence table", "slope of the paper's fit, P^1.27"]
    assert list(lines["paper, cadence table"].get_ydata()) == [40.58, 96.57]


def test_a_solver_that_refused_a_structure_is_not_drawn():
    figure = drawn("solvers")
    titles = {axes.get_title(): len(axes.get_lines()) for axes in figure.axes}
    assert titles == {"resnet18, diagonal": 5, "resnet18, e-kfac": 3, "vit-s, diagonal": 5, "vit-s, e-kfac": 3}


def test_bars_are_as_long_as_what_was_measured():
    (axes,) = drawn("memory-vit-b").axes
    sizes = [row["peak_bytes"] / 2**30 for row in recorded("memory-vit-b")["rows"]]
    assert [bar.get_width() for bar in axes.patches[: len(sizes)]] == sizes
    seconds, errors = drawn("refresh-vit-b-few").axes
    assert [round(bar.get_width(), 2) for bar in seconds.patches] == [1.71, 1.05, 0.86]
    assert [round(bar.get_width(), 1) for bar in errors.patches] == [4.7, 4.9, 5.5]
    assert [axes.get_title() for axes in drawn("peers").axes] == ["resnet18", "vit-b"]


def test_refreshes_of_several_networks_are_told_apart():
    rows = [
        {"model": model, "structure": "kfac", "engine": "forward", "seconds": {"median": 1.0}}
        for model in ("vit-b", "vit-l")
    ]
    (axes,) = plots.refresh([*rows, {"model": "vit-s", "structure": "kfac", "refused": "too large"}]).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["vit-b, kfac, forward", "vit-l, kfac, forward"]


def test_a_picture_of_refreshes_that_were_all_refused_is_refused():
    with pytest.raises(ConfigurationError, match="--plot: every refresh was refused"):
        plots.refresh([{"model": "vit-b", "structure": "kfac", "engine": "auto", "refused": "not with kfac"}])


def test_an_engine_compared_with_itself_is_drawn_without_a_warning():
    rows = [row | {"errors": {"Ug": 0.0}} for row in recorded("refresh-vit-b-few")["rows"][:1]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plots.DRAWINGS["refresh"][0](rows)


def test_shards_are_drawn_beside_the_paper_s_storage():
    memory, traffic = drawn("shards-cpu").axes
    lines = {line.get_label(): line for line in memory.get_lines()}
    assert list(lines) == ["ViT-Ti/16", "ViT-B/16", "ViT-L/16", "ResNet-18", "paper"]
    assert list(lines["paper"].get_ydata()) == [92.45, 23.11, 1479.44, 369.86, 5215.13, 1303.78]
    assert len(traffic.get_lines()) == 4


def test_a_picture_of_steps():
    sample = {"median": 2.0, "low": 1.9, "high": 2.1, "n": 3}
    rows = [{"model": "resnet18", "passes": "eager", "method": name, "vs_sgd": sample} for name in ("SGD", "SAM")]
    (axes,) = plots.DRAWINGS["step"][0](rows).axes
    assert (axes.get_title(), len(axes.patches)) == ("resnet18, eager", 2)


def test_an_svg_follows_light_and_dark_and_names_its_source(tmp_path):
    plots.save_recorded(RECORDS / "cadence-vit.json", tmp_path / "x.svg")
    text = (tmp_path / "x.svg").read_text()
    head, style, body = re.split(r"<style>|</style>", text, maxsplit=2)
    assert "<svg" in head
    assert "@media (prefers-color-scheme: dark)" in style
    used = set(re.findall(r"(?:stroke|fill): (#[0-9a-f]{6})", body))
    assert used
    assert used <= pictures.IN_THE_DARK.keys()
    assert f"<dc:source>{pictures.digest(RECORDS / 'cadence-vit.json')}</dc:source>" in text
    assert "http" not in re.sub(r"https?://(www\.w3\.org|purl\.org|creativecommons\.org)", "", text)
    again = tmp_path / "y.svg"
    plots.save_recorded(RECORDS / "cadence-vit.json", again)
    assert again.read_text() == text


@pytest.mark.parametrize("suffix", ["png", "pdf"])
def test_other_formats_are_written(tmp_path, suffix):
    plots.save_recorded(RECORDS / "scaling-vit.json", tmp_path / f"x.{suffix}")
    assert (tmp_path / f"x.{suffix}").stat().st_size > 1000


@pytest.mark.parametrize("content", ["{}", "[]", "nothing"])
def test_a_file_that_is_no_measurement_is_refused(tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ConfigurationError, match=r"x\.json is no file that"):
        plots.save_recorded(tmp_path / "x.json", tmp_path / "x.svg")


def run_cli(*arguments):
    with pytest.raises(SystemExit) as end:
        cli.main([str(argument) for argument in arguments])
    return end.value.code


def test_the_commands_draw(tmp_path, capsys):
    small = ["--device", "cpu", "--model", "mlp", "--batch", "8", "--products", "2", "--quiet"]
    assert run_cli("bench", "solvers", *small, "--out", tmp_path / "s.json", "--plot", tmp_path / "new/s.svg") == 0
    assert "products with H" in (tmp_path / "new/s.svg").read_text()
    assert run_cli("bench", "plot", tmp_path / "s.json", "--to", tmp_path / "pictures") == 0
    assert capsys.readouterr().out.strip().endswith("s.svg")
    assert (tmp_path / "pictures/s.svg").exists()


@pytest.mark.parametrize(
    ("name", "code", "said"), [("x.gif", 2, "must end in .svg, .png or .pdf"), ("file/x.svg", 73, "cannot be written")]
)
def test_a_picture_that_cannot_be_written_is_refused_before_measuring(tmp_path, capsys, monkeypatch, name, code, said):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("llqr.lab.bench.solvers.curve", lambda *arguments: pytest.fail("it measured"))
    assert run_cli("bench", "solvers", "--device", "cpu", "--plot", tmp_path / name) == code
    assert said in capsys.readouterr().err


def test_the_pictures_of_the_site_are_those_of_the_measurements():
    """If this fails, run `make figures`."""
    drawn_from = {path.stem: path for path in (ROOT / "docs/figures/bench").glob("*.svg")}
    assert drawn_from.keys() == {path.stem for path in RECORDS.glob("*.json")}
    for name, path in drawn_from.items():
        assert pictures.digest(RECORDS / f"{name}.json") in path.read_text(), name

"""`llqr table --plot`: the numbers of the table, measured beside paper."""

from pathlib import Path

import pytest
from llqr.lab.results.paper_table import Number, PaperCell, PaperTable

from llqr.lab.cli import app as cli
from llqr.lab.config.strict import ConfigurationError
from llqr.lab.results import build_table, measurements, plot

RESULTS = Path(__file__).parents[3] / "results"


def test_measured_and_printed_numbers_are_drawn():
    table = build_table.build("cifar100", measurements.read(RESULTS)).of_rows(["resnet18"])
    (axes,) = plot.draw(table).axes
    printed, measured = (line.get_xdata() for line in axes.get_lines()[:2])
    assert list(printed) == [cell.paper.mean for cell in table.cells]
    assert list(measured) == [cell.measured.mean for cell in table.measured]
    assert [label.get_text() for label in axes.get_yticklabels()] == [cell.column for cell in table.cells]


def test_rows_without_a_measurement_are_left_out_and_a_table_without_any_shows_the_paper(tmp_path):
    runs = measurements.read(RESULTS)
    plot.save(build_table.build("cifar100", runs), tmp_path / "x.svg")
    text = (tmp_path / "x.svg").read_text()
    assert "resnet18" in text
    assert "wrn28-10" not in text
    plot.save(build_table.build("cifar100", []), tmp_path / "y.svg")
    assert "wrn28-10" in (tmp_path / "y.svg").read_text()


def test_dollar_signs_in_names_are_shown(tmp_path):
    cells = [PaperCell("my $row$", r"$\frac$", Number(1.0, None, 1), None)]
    plot.save(PaperTable("own", "accuracy", cells), tmp_path / "x.svg")
    text = (tmp_path / "x.svg").read_text()
    assert "my $row$" in text
    assert r"$\frac$" in text


def test_the_names_of_long_rows_stay_inside_the_picture():
    row = ", ".join(f"geometry.inner.setting{number}={number}" for number in range(6))
    figure = plot.draw(PaperTable("own", "accuracy", [PaperCell(row, "sam", Number(1.0, None, 1), None)]))
    figure.draw_without_rendering()
    box = figure.axes[0].title.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1


@pytest.mark.parametrize(("picture", "table"), [("cifar100", "cifar100")])
def test_the_pictures_of_the_site_are_those_of_the_results(picture, table):
    """If this fails, run `make figures`."""
    built = build_table.build(table, measurements.read(RESULTS))
    assert plot.digest(built) in (RESULTS.parent / f"docs/figures/{picture}.svg").read_text()


def test_a_table_of_counts_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="storage compares no methods"):
        plot.save(build_table.build("storage", []), tmp_path / "x.svg")


def test_a_table_that_only_we_have_needs_a_run(tmp_path):
    with pytest.raises(ConfigurationError, match="--plot: no run counts in digits yet"):
        plot.save(build_table.build("digits", []), tmp_path / "x.svg")


def test_the_command_draws_and_prints(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["table", "cifar100", "--results", str(RESULTS), "--plot", str(tmp_path / "x.png")])
    assert end.value.code == 0
    assert "llqr-ngd+sam" in capsys.readouterr().out
    assert (tmp_path / "x.png").exists()

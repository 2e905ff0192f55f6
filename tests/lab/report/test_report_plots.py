"""Plots of the page whose rows have names."""

import warnings

from llqr.lab.report.plots import Look, Plot


def test_long_names_leave_room_for_the_plot():
    """A method that was run with several settings is named after all of them."""
    names = [f"llqr-ngd, geometry.structure={kind}, geometry.bounds=None, training.epochs=200" for kind in "abc"]
    plot = Plot("label", "top eigenvalue", "", {name: Look("#000000", "solid") for name in names})
    for row, name in enumerate(names):
        plot.dots(name, row, [1.0 + row], filled=True)
    plot.name_rows(names)
    with warnings.catch_warnings(action="error"):
        assert "geometry.structure=c" in plot.svg()
    assert plot.axes.get_position().width > 0.4

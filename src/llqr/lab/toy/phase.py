"""Escape phase diagrams over (rho, lambda_bar), and over the learning rate."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import numpy as np
import typer
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from llqr.lab.pictures import styled, written_out
from llqr.lab.toy.drawing import LABELS, panels, shared_legend
from llqr.lab.toy.experiment import Progress, ToyResult
from llqr.theory import PhaseDiagram, PhaseSettings, escape_diagram, finite_rate_envelope, rate_diagram
from llqr.theory.arguments import Array
from llqr.theory.phase import Cells


def run_phase(
    progress: Progress,
    rows: Annotated[int, typer.Option(min=3, help="Cells along lambda_bar, and along the learning rate.")] = 28,
    columns: Annotated[int, typer.Option(min=3, help="Cells along rho.")] = 40,
    steps: Annotated[int, typer.Option(min=10, help="Steps after which a cell counts as trapped.")] = 4000,
) -> ToyResult:
    """Escape phase diagrams over (rho, lambda_bar) and over the learning rate, against the predicted line."""
    settings = PhaseSettings(steps=steps)
    bar, rho = np.geomspace(0.1, 2.0, rows), np.geomspace(0.05, 4.0, columns)
    diagrams, finite = {}, {}
    for method in ("sam", "llqr+sam"):
        report = partial(progress, f"phase diagram of {LABELS[method]}")
        diagrams[method] = escape_diagram(method, bar, rho, settings, report)
        sharpness = bar + settings.lambda_eps
        rate = settings.eta * (sharpness if method == "sam" else sharpness / bar)
        finite[method] = finite_rate_envelope(rate, settings) * (1 if method == "sam" else np.sqrt(bar))
    rates = np.geomspace(0.05, 2.5, rows)
    over_rate = rate_diagram(
        rates, np.geomspace(0.1, 4.0, columns), settings, progress=partial(progress, "learning rates")
    )
    finite_rate = finite_rate_envelope(rates, settings)
    breaks = float(rates[np.argmax(over_rate.boundary < 0.8 * settings.r_eps)])
    unstable = float(rates[np.argmax(over_rate.escaped.all(1))])
    numbers: dict[str, dict[str, Any]] = {
        method: {
            "agreement": diagram.agreement,
            "agreement_off_line": diagram.agreement_off_line,
            "agreement_finite_rate": diagram.agreement_with(finite[method]),
            "monotone": diagram.monotone,
            "boundary_rho": diagram.boundary,
            "finite_rate_rho": finite[method],
            "escaped": diagram.escaped.astype(int),
        }
        for method, diagram in diagrams.items()
    }
    both = {method: f"{100 * numbers[method]['agreement_off_line']:.1f}%" for method in diagrams}
    return ToyResult(
        "phase",
        "Escape phase diagrams",
        [
            f"One pothole on a slope per cell, {rows} x {columns} cells, learning rate {settings.eta:g}. The line "
            f"envelope = r_eps predicts {100 * numbers['sam']['agreement']:.1f}% of all cells for SAM and "
            f"{100 * numbers['llqr+sam']['agreement']:.1f}% for LLQR+SAM; {both['sam']} and {both['llqr+sam']} of the "
            "cells that do not touch the line.",
            "The remaining cells lie just left of the line, for three reasons: the probe of a hovering iterate reaches "
            "2 / (2 - eta mu) envelopes, the slope moves the minimum downhill, and the rim of the well does not "
            "restore. The dashed line includes all three and agrees with "
            f"{100 * numbers['sam']['agreement_finite_rate']:.1f}% and "
            f"{100 * numbers['llqr+sam']['agreement_finite_rate']:.1f}% of all cells.",
            f"The envelope argument stops holding as the learning rate grows: from eta mu = {breaks:.2f} on, iterates "
            f"leave wells a quarter wider than the envelope, and from {unstable:.2f} on, they leave every well of the "
            f"diagram. The line r_eps explains {100 * over_rate.agreement:.1f}% of the cells, the dashed line "
            f"{100 * over_rate.agreement_with(finite_rate):.1f}%.",
        ],
        {
            "settings": settings, "lambda_bar": bar, "rho": rho, "diagrams": numbers,
            "learning_rate": {
                "eta_mu": rates, "envelope": over_rate.columns,
                "agreement": over_rate.agreement, "agreement_finite_rate": over_rate.agreement_with(finite_rate),
                "envelope_argument_fails_from": breaks, "all_leave_from": unstable,
                "boundary_envelope": [None if np.isnan(b) else float(b) for b in over_rate.boundary],
                "finite_rate_envelope": finite_rate, "escaped": over_rate.escaped.astype(int),
            },
        },
        {
            "phase": phase_figure(diagrams, settings.r_eps, finite),
            "rate": rate_figure(over_rate, settings.r_eps, finite_rate),
        },
    )  # fmt: skip


@styled
def phase_figure(diagrams: Mapping[str, PhaseDiagram], r_eps: float, finite: Mapping[str, Array]) -> Figure:
    figure, axes = panels(2, width=4.0, height=3.3, share_y=True)
    for axis, (method, diagram) in zip(axes, diagrams.items(), strict=True):
        draw_cells(axis, diagram.columns, diagram.rows, diagram.escaped)
        bar = diagram.rows
        line = r_eps * np.sqrt(bar) if method == "llqr+sam" else np.full_like(bar, r_eps)
        axis.plot(line, bar, color="black", lw=1.8)
        axis.plot(finite[method], bar, color="black", lw=1.4, ls="--")
        axis.set(xscale="log", yscale="log", xlabel=r"probe radius $\rho$ (units of $r_\epsilon$)")
        written_out(axis.xaxis, (0.05, 0.1, 0.2, 0.5, 1, 2, 4))
        written_out(axis.yaxis, (0.1, 0.2, 0.5, 1, 2))
        axis.set_title(f"{LABELS[method]}: {100 * diagram.agreement_off_line:.1f}% agree off the line")
    axes[0].set_ylabel(r"average curvature $\bar\lambda$")
    shared_legend(
        figure,
        [
            *cell_handles(),
            Line2D([], [], color="black", lw=1.8, label="predicted: envelope = $r_\\epsilon$"),
            Line2D([], [], color="black", lw=1.4, ls="--", label="with finite learning rate, slope and rim"),
        ],
    )
    return figure


@styled
def rate_figure(diagram: PhaseDiagram, r_eps: float, finite: Array) -> Figure:
    figure, (axis,) = panels(1, width=4.6, height=3.5)
    draw_cells(axis, diagram.rows, diagram.columns, diagram.escaped.T)
    axis.axhline(r_eps, color="black", lw=1.8)
    known = finite > 0
    axis.plot(diagram.rows[known], finite[known], color="black", lw=1.4, ls="--")
    axis.axvline(2.0, color="black", lw=1.2, ls=":")
    axis.set(xscale="log", yscale="log", xlabel=r"learning rate $\eta\mu$", ylim=diagram.columns[[0, -1]])
    written_out(axis.xaxis, (0.05, 0.1, 0.2, 0.5, 1, 2))
    written_out(axis.yaxis, (0.1, 0.2, 0.5, 1, 2, 4))
    axis.set_ylabel(r"envelope $\rho/\sqrt{\bar\lambda}$ (units of $r_\epsilon$)")
    handles = [
        *cell_handles(),
        Line2D([], [], color="black", lw=1.8, label="envelope = $r_\\epsilon$"),
        Line2D([], [], color="black", lw=1.4, ls="--", label=r"restoring radius $\times(1-\eta\mu/2)$"),
        Line2D([], [], color="black", lw=1.2, ls=":", label=r"$\eta\mu=2$"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def draw_cells(axis: Axes, x: Array, y: Array, escaped: Cells) -> None:
    colours = ListedColormap(["#56B4E9", "#F0E442"])
    axis.pcolormesh(x, y, escaped, cmap=colours, vmin=0, vmax=1, shading="nearest", edgecolors="white", lw=0.15)


def cell_handles() -> list[Patch]:
    return [Patch(color="#56B4E9", label="stays in the well"), Patch(color="#F0E442", label="leaves it")]

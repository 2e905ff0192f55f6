"""Measured escape phase diagrams: in which cells of a grid does the iterate leave its pothole?

Every cell is one row of a real optimizer: a pothole on a slope (`PotholeOnSlope`), started next to the bottom of the
well. A cell counts as escaped once its iterate has been outside the well. `rho / sqrt(lambda_bar) = r_eps` is the
paper's line for LLQR+SAM, `rho = r_eps` its line for SAM.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

from llqr.lab.pictures import styled, written_out
from llqr.lab.toy.drawing import LABELS, panels, shared_legend
from llqr.lab.toy.experiment import ToyResult
from llqr.theory import Method, Pothole, PotholeOnSlope, iterate
from llqr.theory.arguments import Array, positive
from llqr.theory.landscapes import Number

Cells = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class PhaseSettings:
    """The pothole of every cell. The tilt leads out of it once the well no longer restores."""

    r_eps: float = 1.0
    lambda_eps: float = 200.0
    tilt_fraction: float = 0.08
    """Slope of the bowl over the well's steepest slope `lambda_eps r_eps`."""
    edge: float = 0.05
    eta: float = 1e-4
    steps: int = 4000

    @property
    def restoring_radius(self) -> float:
        """How far downhill from its minimum the well's restoring force keeps growing.

        The tilt moves the minimum downhill by `tilt_fraction r_eps`, and the outermost fraction `edge` of the well is
        its rim.
        """
        return (1 - self.edge - self.tilt_fraction) * self.r_eps

    def landscape(self, lambda_bar: Number) -> PotholeOnSlope:
        tilt = self.tilt_fraction * self.lambda_eps * self.r_eps
        return PotholeOnSlope(lambda_bar, tilt, Pothole(self.lambda_eps, self.r_eps, edge=self.edge))


@dataclass(frozen=True)
class PhaseDiagram:
    """`escaped[i, j]` at `rows[i]`, `columns[j]`, and the prediction; columns are `rho` or probe lengths."""

    rows: Array
    columns: Array
    escaped: Cells
    predicted: Cells

    @property
    def agreement(self) -> float:
        """Fraction of all cells in which simulation and prediction agree."""
        return float((self.escaped == self.predicted).mean())

    @property
    def agreement_off_line(self) -> float:
        """The same without the cells that touch the predicted line: those with a neighbour predicted differently."""
        far = ~near_line(self.predicted)
        return float((self.escaped == self.predicted)[far].mean())

    def agreement_with(self, threshold: npt.ArrayLike) -> float:
        """Fraction of all cells in which simulation agrees with `columns > threshold`, one threshold per row."""
        return float((self.escaped == (self.columns > np.asarray(threshold)[:, None])).mean())

    @property
    def monotone(self) -> bool:
        """Whether all radii above one that escapes escape too: no row goes back from escaped to trapped."""
        return bool((np.diff(self.escaped.astype(np.int8), axis=1) >= 0).all())

    @property
    def boundary(self) -> Array:
        """Per row, the geometric mean of the last trapped and the first escaped column; NaN where one is missing."""
        first = self.escaped.argmax(1)
        known = self.escaped.any(1) & (first > 0)
        edge = np.sqrt(self.columns[first] * self.columns[np.maximum(first - 1, 0)])
        return np.where(known, edge, np.nan)


def near_line(predicted: Cells) -> Cells:
    """Cells one of whose eight neighbours is predicted differently."""
    around = np.lib.stride_tricks.sliding_window_view(np.pad(predicted, 1, mode="edge"), (3, 3))
    return np.asarray((around != predicted[..., None, None]).any(axis=(2, 3)))


def escape_diagram(
    method: Method, lambda_bar: npt.ArrayLike, rho: npt.ArrayLike, settings: PhaseSettings = PhaseSettings()
) -> PhaseDiagram:
    """Rows are `lambda_bar`, columns `rho`, one learning rate for all cells."""
    bar, radius = positive("lambda_bar", lambda_bar), positive("rho", rho)
    grid_bar, grid_rho = np.meshgrid(bar, radius, indexing="ij")
    escaped = simulated_escapes(method, grid_bar.ravel(), grid_rho.ravel(), settings)
    envelope = grid_rho / np.sqrt(grid_bar) if method == "llqr+sam" else grid_rho
    return PhaseDiagram(bar, radius, escaped.reshape(grid_bar.shape), envelope > settings.r_eps)


def rate_diagram(
    rate: npt.ArrayLike, envelope: npt.ArrayLike, settings: PhaseSettings = PhaseSettings()
) -> PhaseDiagram:
    """LLQR+SAM over the learning rate: rows are `eta mu`, columns the envelope `rho / sqrt(lambda_bar)`.

    An optimizer has one learning rate, so each row of the diagram uses its own optimizer. `settings.eta` is not used,
    and each row runs long enough for the slope alone to carry an iterate out of the well.
    """
    lambda_bar = 0.5
    rates, reach = positive("rate", rate), positive("envelope", envelope)
    mu = 1 + settings.lambda_eps / lambda_bar
    cells = []
    for value in rates:
        steps = int(np.ceil(4 / (value * settings.tilt_fraction))) + 100
        at = replace(settings, eta=float(value / mu), steps=steps)
        cells.append(simulated_escapes("llqr+sam", np.full_like(reach, lambda_bar), reach * np.sqrt(lambda_bar), at))
    predicted = np.broadcast_to(reach > settings.r_eps, (len(rates), len(reach)))
    return PhaseDiagram(rates, reach, np.stack(cells), predicted.copy())


def finite_rate_envelope(rate: npt.ArrayLike, settings: PhaseSettings) -> Array:
    """The envelope above which the *probe* of a hovering iterate leaves the restoring part: `(1 - eta mu / 2)` of it.

    From `probe_reach`: a probe reaches `2 / (2 - eta mu)` envelopes. Zero from `eta mu = 2` on, where plain descent
    leaves the well too.
    """
    return np.maximum(settings.restoring_radius * (1 - positive("rate", rate) / 2), 0.0)


def simulated_escapes(method: Method, lambda_bar: Array, rho: Array, settings: PhaseSettings) -> Cells:
    """Which of the potholes `(lambda_bar[i], rho[i])` the method leaves within `settings.steps` steps."""
    bar = torch.from_numpy(np.ascontiguousarray(lambda_bar))
    landscape = settings.landscape(bar)
    start = torch.as_tensor(landscape.minimum - 1e-6 * settings.r_eps).unsqueeze(-1)
    times = exit_steps(method, landscape, start, torch.from_numpy(np.ascontiguousarray(rho)), settings)
    return (times <= settings.steps).numpy()


def exit_steps(
    method: Method,
    landscape: PotholeOnSlope,
    start: Tensor,
    rho: Tensor,
    settings: PhaseSettings,
    noise: Callable[[int], Tensor] | None = None,
) -> Tensor:
    """The first of `settings.steps` steps at which each row is outside the well; one more where it never is."""
    lr, steps = settings.eta, settings.steps
    points = iterate(method, landscape.loss, start, lr=lr, steps=steps, rho=rho, metric=landscape.metric, noise=noise)
    times = torch.full((len(start),), steps + 1)
    for step, x in enumerate(points, start=1):
        out = x.squeeze(-1).abs() > settings.r_eps
        times = torch.where(out, times.clamp(max=step), times)
        if step % 100 == 0 and bool((times <= step).all()):
            break
    return times


def first_rate(rates: Array, met: npt.ArrayLike) -> float | None:
    return float(rates[np.argmax(met)]) if np.any(met) else None


def run_phase(rows: int = 28, columns: int = 40, steps: int = 4000) -> ToyResult:
    """Escape phase diagrams over (rho, lambda_bar) and over the learning rate, against the predicted line."""
    settings = PhaseSettings(steps=steps)
    bar, rho = np.geomspace(0.1, 2.0, rows), np.geomspace(0.05, 4.0, columns)
    diagrams, finite = {}, {}
    for method in ("sam", "llqr+sam"):
        diagrams[method] = escape_diagram(method, bar, rho, settings)
        sharpness = bar + settings.lambda_eps
        rate = settings.eta * (sharpness if method == "sam" else sharpness / bar)
        finite[method] = finite_rate_envelope(rate, settings) * (1 if method == "sam" else np.sqrt(bar))
    rates = np.geomspace(0.05, 2.5, rows)
    over_rate = rate_diagram(rates, np.geomspace(0.1, 4.0, columns), settings)
    finite_rate = finite_rate_envelope(rates, settings)
    breaks = first_rate(rates, over_rate.boundary < 0.8 * settings.r_eps)
    unstable = first_rate(rates, over_rate.escaped.all(1))
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
    return ToyResult(
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
        lines = axis.plot(line, bar, color="black", lw=1.8, label="predicted: envelope = $r_\\epsilon$")
        label = "with finite learning rate, slope and rim"
        lines += axis.plot(finite[method], bar, color="black", lw=1.4, ls="--", label=label)
        axis.set(xscale="log", yscale="log", xlabel=r"probe radius $\rho$ (units of $r_\epsilon$)")
        written_out(axis.xaxis, (0.05, 0.1, 0.2, 0.5, 1, 2, 4))
        written_out(axis.yaxis, (0.1, 0.2, 0.5, 1, 2))
        axis.set_title(f"{LABELS[method]}: {100 * diagram.agreement_off_line:.1f}% agree off the line")
    axes[0].set_ylabel(r"average curvature $\bar\lambda$")
    shared_legend(figure, [*cell_handles(), *lines])
    return figure


@styled
def rate_figure(diagram: PhaseDiagram, r_eps: float, finite: Array) -> Figure:
    figure, (axis,) = panels(1, width=4.6, height=3.5)
    draw_cells(axis, diagram.rows, diagram.columns, diagram.escaped.T)
    axis.axhline(r_eps, color="black", lw=1.8, label="envelope = $r_\\epsilon$")
    known = finite > 0
    label = r"restoring radius $\times(1-\eta\mu/2)$"
    axis.plot(diagram.rows[known], finite[known], color="black", lw=1.4, ls="--", label=label)
    axis.axvline(2.0, color="black", lw=1.2, ls=":", label=r"$\eta\mu=2$")
    axis.set(xscale="log", yscale="log", xlabel=r"learning rate $\eta\mu$", ylim=diagram.columns[[0, -1]])
    written_out(axis.xaxis, (0.05, 0.1, 0.2, 0.5, 1, 2))
    written_out(axis.yaxis, (0.1, 0.2, 0.5, 1, 2, 4))
    axis.set_ylabel(r"envelope $\rho/\sqrt{\bar\lambda}$ (units of $r_\epsilon$)")
    figure.legend(handles=[*cell_handles(), *axis.lines], loc="outside lower center", ncols=3)
    return figure


def draw_cells(axis: Axes, x: Array, y: Array, escaped: Cells) -> None:
    colours = ListedColormap(["#56B4E9", "#F0E442"])
    axis.pcolormesh(x, y, escaped, cmap=colours, vmin=0, vmax=1, shading="nearest", edgecolors="white", lw=0.15)


def cell_handles() -> list[Patch]:
    return [Patch(color="#56B4E9", label="stays in the well"), Patch(color="#F0E442", label="leaves it")]

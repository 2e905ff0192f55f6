"""How the toy figures look: one function a figure, colours that survive colour blindness and grey-scale printing."""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

from llqr.theory import METHODS, Hovering, PhaseDiagram, Selection, ToyRuns, Transfer, hovering_envelope
from llqr.theory.exits import ExitTimes

# Okabe and Ito's palette; line styles and markers carry the same information for print.
COLOURS = {"sgd": "#000000", "llqr": "#E69F00", "sam": "#0072B2", "llqr+sam": "#D55E00"}
DASHES = {"sgd": (0, (1, 1)), "llqr": (0, (5, 2)), "sam": (0, (4, 1, 1, 1)), "llqr+sam": "-"}
MARKERS = {"sgd": "s", "llqr": "^", "sam": "o", "llqr+sam": "D"}
LABELS = {"sgd": "SGD", "llqr": "LLQR", "sam": "SAM", "llqr+sam": "LLQR+SAM"}
GREEN, PURPLE, GREY = "#009E73", "#CC79A7", "#7F7F7F"

STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.constrained_layout.use": True,
    "svg.fonttype": "none",
    "svg.hashsalt": "llqr",
}


def styled(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """Everything a figure holds is made inside the style, late additions included."""

    @wraps(draw)
    def drawn(*arguments: object, **options: object) -> Figure:
        with plt.rc_context(STYLE):
            return draw(*arguments, **options)

    return drawn


def panels(count: int, width: float = 3.2, height: float = 2.9, **options: object) -> tuple[Figure, list[Axes]]:
    figure, axes = plt.subplots(1, count, figsize=(width * count, height), **options)
    return figure, list(np.atleast_1d(axes))


def plain_ticks(axis: object, ticks: Sequence[float]) -> None:
    """On a logarithmic axis of few decades: these numbers, written out, and no others."""
    axis.set_major_locator(FixedLocator(list(ticks)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def shared_legend(figure: Figure, handles: list[object]) -> None:
    """Below the panels, where it hides nothing."""
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)


def method_handles(methods: tuple[str, ...] = METHODS) -> list[Line2D]:
    return [Line2D([], [], color=COLOURS[m], ls=DASHES[m], lw=1.6, label=LABELS[m]) for m in methods]


def toy_map(axis: Axes, runs: ToyRuns, rows: Sequence[int], title: str) -> None:
    """The landscape from above with a trajectory of each method from each start, up to the flat basin."""
    ring = runs.landscape
    reach = 1.35 * ring.radius
    grid = torch.linspace(-reach, reach, 301, dtype=torch.float64)
    points = torch.stack(torch.meshgrid(grid, grid, indexing="xy"), dim=-1)
    loss = ring.loss(points).numpy()
    axis.contourf(grid, grid, loss, levels=18, cmap="Greys", alpha=0.55, antialiased=True)
    circle = np.linspace(0, 2 * np.pi, 200)
    axis.plot(ring.flat_radius * np.cos(circle), ring.flat_radius * np.sin(circle), color=GREEN, lw=1.2)
    for row in rows:
        # LLQR+SAM wide and first, the others thin and on top of it: paths along one ray lie on one line.
        for method in ("llqr+sam", "sgd", "llqr", "sam"):
            path = runs.trajectories[method].positions[:, row]
            stop = int(runs.flat_step(method)[row])
            path = path[: stop + 1] if stop > 0 else path
            wide = {"lw": 4.0, "alpha": 0.6} if method == "llqr+sam" else {"lw": 1.0}
            axis.plot(path[:, 0], path[:, 1], color=COLOURS[method], zorder=4, **wide)
            axis.plot(*path[-1], marker=MARKERS[method], color=COLOURS[method], ms=3, zorder=6)
        start = runs.trajectories["sgd"].positions[0, row]
        axis.plot(*start, marker="*", color="white", mec="black", mew=0.8, ms=11, zorder=5)
    axis.set(aspect="equal", xlabel=r"$\theta_1$", ylabel=r"$\theta_2$", title=title, xlim=(-reach, reach))
    axis.set_ylim(-reach, reach)


def toy_slice(axis: Axes, runs: ToyRuns, probes: Mapping[str, float]) -> None:
    """The loss along a ray, with the probes' lengths drawn from the bottom of the ring."""
    ring = runs.landscape
    r = torch.linspace(0, 1.35 * ring.radius, 1201, dtype=torch.float64)
    axis.plot(r, ring.along_ray(r), color="black", lw=1.4)
    bowl = 0.5 * ring.curvature[0] * r**2
    axis.plot(r, bowl, color=GREY, lw=1, ls=":")
    axis.text(2.9, float(0.5 * ring.curvature[0] * 2.9**2) + 0.4, "average bowl", color=GREY, fontsize=7, ha="right")
    bottom = ring.bottom()
    x, y = float(bottom.norm()), float(ring.loss(bottom))
    for offset, (method, length) in enumerate(probes.items()):
        height = y - 0.5 - 0.7 * offset
        axis.plot([x - length, x], [height, height], color=COLOURS[method], lw=2.5, solid_capstyle="butt")
        axis.text(x - length - 0.1, height, f"{LABELS[method]} probe", color=COLOURS[method], fontsize=7,
                  va="center", ha="right")  # fmt: skip
    axis.axvspan(0, ring.flat_radius, color=GREEN, alpha=0.15, lw=0)
    axis.set(xlabel=r"distance from the origin $r$", ylabel="loss", title="slice along a ray")


def band(axis: Axes, x: np.ndarray, values: np.ndarray, method: str) -> None:
    """Median over rows, with the range of all rows shaded."""
    axis.fill_between(x, values.min(1), values.max(1), color=COLOURS[method], alpha=0.15, lw=0)
    axis.plot(x, np.median(values, axis=1), color=COLOURS[method], ls=DASHES[method], lw=1.6)


@styled
def escape_figure(runs: ToyRuns) -> Figure:
    figure, (slice_, map_, loss) = panels(3)
    rho, bar = runs.constants.rho, runs.constants.lambda_bar
    toy_slice(slice_, runs, {"sam": rho, "llqr+sam": float(hovering_envelope(rho, bar))})
    starts = runs.trajectories["sgd"].positions.shape[1]
    toy_map(map_, runs, range(0, starts, max(1, starts // 5)), "some of the starts (stars)")
    for method in METHODS:
        values = runs.losses(method).clamp(min=1e-9).numpy()
        band(loss, np.arange(1, len(values) + 1), values, method)
    loss.set(xscale="log", yscale="log", xlabel="step + 1", ylabel="loss above the flat minimum")
    loss.set_title(f"median and range, {values.shape[1]} starts")
    shared_legend(figure, [*method_handles(), Line2D([], [], color=GREEN, lw=1.2, label="flat basin")])
    return figure


@styled
def ejection_figure(runs: ToyRuns) -> Figure:
    figure, (map_, radius, path) = panels(3)
    toy_map(map_, runs, [0], "seed 0, from the bottom (star)")
    for method in METHODS:
        values = runs.trajectories[method].positions.norm(dim=-1).numpy()
        band(radius, np.arange(1, len(values) + 1), values, method)
    radius.axhline(runs.landscape.flat_radius, color=GREEN, lw=1)
    radius.set(xscale="log", xlabel="step + 1", ylabel=r"distance from the origin $|\theta|$")
    radius.set_title(f"median and range, {values.shape[1]} seeds")
    order = torch.argsort(runs.path_to_flat("sam"))
    for method in ("sam", "llqr+sam"):
        path.plot(
            np.arange(1, len(order) + 1), runs.path_to_flat(method)[order],
            color=COLOURS[method], marker=MARKERS[method], ms=3.5, lw=0, label=LABELS[method],
        )  # fmt: skip
    path.set(yscale="log", xlabel="noise seed (sorted by SAM's path)", ylabel="path length to the flat basin")
    plain_ticks(path.yaxis, (2, 5, 10, 20, 50, 100, 200))
    path.set_title("all seeds, noise shared by the methods")
    shared_legend(figure, [*method_handles(), Line2D([], [], color=GREEN, lw=1.2, label="flat basin")])
    return figure


@styled
def damping_figure(
    d: np.ndarray, measured: Mapping[str, np.ndarray], line: np.ndarray, closed: Mapping[str, np.ndarray]
) -> Figure:
    """Measured at `d`, closed forms along `line`."""
    figure, axes = panels(2)
    names = {"variance": r"stationary variance of $z$", "motion": r"$E[(z_{t+1}-z_t)^2]$"}
    for axis, (key, label) in zip(axes, names.items(), strict=True):
        axis.plot(line, closed[key], color="black", lw=1.4, label="closed form")
        axis.plot(d, measured[key], color=COLOURS["llqr+sam"], marker="o", ms=4, lw=0, label=r"$10^6$ steps, simulated")
        axis.set(xscale="log", yscale="log", xlabel=r"metric denominator $d$", ylabel=label)
        plain_ticks(axis.xaxis, (0.3, 0.5, 1, 2, 4))
        axis.legend(loc="upper right")
    return figure


@styled
def phase_figure(diagrams: Mapping[str, PhaseDiagram], r_eps: float, finite: Mapping[str, np.ndarray]) -> Figure:
    figure, axes = panels(2, width=4.0, height=3.3, sharey=True)
    for axis, (method, diagram) in zip(axes, diagrams.items(), strict=True):
        cells(axis, diagram.columns, diagram.rows, diagram.escaped)
        bar = diagram.rows
        line = r_eps * np.sqrt(bar) if method == "llqr+sam" else np.full_like(bar, r_eps)
        axis.plot(line, bar, color="black", lw=1.8)
        axis.plot(finite[method], bar, color="black", lw=1.4, ls="--")
        axis.set(xscale="log", yscale="log", xlabel=r"probe radius $\rho$ (units of $r_\epsilon$)")
        plain_ticks(axis.xaxis, (0.05, 0.1, 0.2, 0.5, 1, 2, 4))
        plain_ticks(axis.yaxis, (0.1, 0.2, 0.5, 1, 2))
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
def rate_figure(diagram: PhaseDiagram, r_eps: float, finite: np.ndarray) -> Figure:
    figure, (axis,) = panels(1, width=4.6, height=3.5)
    cells(axis, diagram.rows, diagram.columns, diagram.escaped.T)
    axis.axhline(r_eps, color="black", lw=1.8)
    known = finite > 0
    axis.plot(diagram.rows[known], finite[known], color="black", lw=1.4, ls="--")
    axis.axvline(2.0, color="black", lw=1.2, ls=":")
    axis.set(xscale="log", yscale="log", xlabel=r"learning rate $\eta\mu$", ylim=diagram.columns[[0, -1]])
    plain_ticks(axis.xaxis, (0.05, 0.1, 0.2, 0.5, 1, 2))
    plain_ticks(axis.yaxis, (0.1, 0.2, 0.5, 1, 2, 4))
    axis.set_ylabel(r"envelope $\rho/\sqrt{\bar\lambda}$ (units of $r_\epsilon$)")
    handles = [
        *cell_handles(),
        Line2D([], [], color="black", lw=1.8, label="envelope = $r_\\epsilon$"),
        Line2D([], [], color="black", lw=1.4, ls="--", label=r"restoring radius $\times(1-\eta\mu/2)$"),
        Line2D([], [], color="black", lw=1.2, ls=":", label=r"$\eta\mu=2$"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def cells(axis: Axes, x: np.ndarray, y: np.ndarray, escaped: np.ndarray) -> None:
    colours = ListedColormap(["#56B4E9", "#F0E442"])
    axis.pcolormesh(x, y, escaped, cmap=colours, vmin=0, vmax=1, shading="nearest", edgecolors="white", lw=0.15)


def cell_handles() -> list[Patch]:
    return [Patch(color="#56B4E9", label="stays in the well"), Patch(color="#F0E442", label="leaves it")]


@styled
def hover_figure(
    series: Mapping[str, np.ndarray], envelopes: Mapping[str, float], wells: Mapping[str, Hovering],
    collapse: tuple[np.ndarray, np.ndarray],
) -> Figure:  # fmt: skip
    figure, (time, amplitude, rate) = panels(3)
    for method, z in series.items():
        time.plot(z, color=COLOURS[method], ls="-", marker=MARKERS[method], ms=2.5, lw=0.9)
        for sign in (-1, 1):
            time.axhline(sign * envelopes[method], color=COLOURS[method], ls=":", lw=1.2)
    time.set(xlabel="step", ylabel="$z_t$", title=r"one well; dotted: envelopes")
    for method, well in wells.items():
        amplitude.plot(well.lambda_bar, well.predicted, color=COLOURS[method], ls=DASHES[method], lw=1.4)
        amplitude.plot(
            well.lambda_bar, well.measured, color=COLOURS[method], marker=MARKERS[method], ms=4, lw=0, mfc="none"
        )
    amplitude.set(xscale="log", yscale="log", xlabel=r"average curvature $\bar\lambda$", ylabel="two-cycle amplitude")
    amplitude.set_title("markers: measured, lines: closed form")
    rates, ratio = collapse
    rate.plot(rates, ratio, color=COLOURS["llqr+sam"], marker="D", ms=3.5, lw=0, mfc="none")
    line = np.linspace(rates.min(), rates.max(), 200)
    rate.plot(line, line / (2 - line), color="black", lw=1.2)
    rate.axhline(1, color=GREY, ls=":", lw=1)
    rate.set(yscale="log", xlabel=r"$\eta\mu$", ylabel="amplitude / envelope")
    rate.set_title(r"line: $\eta\mu/(2-\eta\mu)$, any $\lambda_\epsilon$")
    shared_legend(figure, method_handles(("sam", "llqr+sam")))
    return figure


@styled
def selection_figure(
    selection: Selection, over_rho: Mapping[str, ExitTimes], over_sigma: Mapping[str, ExitTimes],
    thresholds: Mapping[str, float], cut_at: int,
) -> Figure:  # fmt: skip
    figure, (occupied, rho, sigma) = panels(3)
    occupied.plot(selection.sigma, selection.bound, color="black", lw=1.4, label="bound")
    occupied.plot(selection.sigma, selection.simulated, color=GREEN, marker="o", ms=4, lw=0, label="simulated")
    occupied.set(xscale="log", yscale="log", xlabel=r"noise scale $\sigma$ ($R=1$)")
    occupied.set(ylabel="time in sharp wells (fraction)", title=f"slope in the rate: {selection.slope_in_rate:.3f}")
    occupied.legend(loc="upper left")
    for axis, family in ((rho, over_rho), (sigma, over_sigma)):
        for method, times in family.items():
            x = times.rho if family is over_rho else times.sigma
            style = {"color": COLOURS[method], "marker": MARKERS[method], "ms": 4}
            axis.plot(x, times.mean, ls=DASHES[method], lw=1.2, **style)
        axis.axhline(cut_at, color=GREY, ls=":", lw=1)
        axis.set(xscale="log", yscale="log", ylabel="mean exit time (steps)")
    for method, threshold in thresholds.items():
        rho.axvline(threshold, color=COLOURS[method], lw=0.9, ls=":")
    plain_ticks(rho.xaxis, (0.2, 0.5, 1, 2))
    plain_ticks(occupied.xaxis, (0.01, 0.02, 0.05, 0.1))
    plain_ticks(occupied.yaxis, (0.001, 0.003, 0.01, 0.03, 0.1))
    rho.set(xlabel=r"probe radius $\rho$ (units of $r_\epsilon$)", title="vertical: envelope = $r_\\epsilon$")
    sigma.set(xlabel=r"gradient noise $\sigma$", title=f"grey: runs are cut at {cut_at} steps")
    shared_legend(figure, method_handles(("sam", "llqr+sam")))
    return figure


@styled
def transfer_figure(runs: Mapping[str, Transfer]) -> Figure:
    figure, (axis,) = panels(1, width=4.8, height=4.0)
    styles = zip([COLOURS["sam"], COLOURS["llqr+sam"], GREEN, PURPLE], ["-", "--", "-.", ":"], strict=True)
    for (name, run), (colour, dash) in zip(runs.items(), styles, strict=True):
        T = np.arange(1, len(run.running_mean) + 1)
        axis.plot(T, run.running_mean, color=colour, ls=dash, lw=1.5, label=f"{name}: slope {run.slope():.2f}")
    reference = np.array([0.02 * len(T), len(T)])
    top = max(run.running_mean[int(reference[0])] for run in runs.values())
    axis.plot(reference, 1.6 * top * (reference / reference[0]) ** -0.5, color="black", lw=1, label=r"$T^{-1/2}$")
    axis.set(xscale="log", yscale="log", xlabel="$T$", ylabel=r"mean of $g\cdot Ug$ over the first $T$ steps")
    figure.legend(loc="outside lower center", ncols=1)
    return figure

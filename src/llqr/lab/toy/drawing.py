"""How the toy figures look: colours that survive colour blindness and grey-scale printing, panels, and the ring."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from llqr.lab.toy.ring import ToyRuns
from llqr.theory import METHODS
from llqr.theory.arguments import Array

# Okabe and Ito's palette; line styles and markers carry the same information in grey-scale print.
COLOURS = {"sgd": "#000000", "llqr": "#E69F00", "sam": "#0072B2", "llqr+sam": "#D55E00"}
DASHES = {"sgd": (0, (1, 1)), "llqr": (0, (5, 2)), "sam": (0, (4, 1, 1, 1)), "llqr+sam": "-"}
MARKERS = {"sgd": "s", "llqr": "^", "sam": "o", "llqr+sam": "D"}
LABELS = {"sgd": "SGD", "llqr": "LLQR", "sam": "SAM", "llqr+sam": "LLQR+SAM"}
GREEN, PURPLE, GREY = "#009E73", "#CC79A7", "#7F7F7F"


def panels(count: int, width: float = 3.2, height: float = 2.9, *, share_y: bool = False) -> tuple[Figure, list[Axes]]:
    """A figure with ``count`` panels side by side; ``width`` and ``height`` are those of one panel, in inches."""
    figure = Figure(figsize=(width * count, height), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False, sharey=share_y)[0])


def shared_legend(figure: Figure, handles: Sequence[Artist]) -> None:
    """One legend below all panels, where it hides nothing."""
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)


def method_handles(methods: tuple[str, ...] = METHODS) -> list[Line2D]:
    return [Line2D([], [], color=COLOURS[m], ls=DASHES[m], lw=1.6, label=LABELS[m]) for m in methods]


def band(axis: Axes, values: Array, method: str) -> None:
    """Plot ``values`` of shape (steps, rows) against step + 1: the median over rows, with their range shaded."""
    x = np.arange(1, len(values) + 1)
    axis.fill_between(x, values.min(1), values.max(1), color=COLOURS[method], alpha=0.15, lw=0)
    axis.plot(x, np.median(values, axis=1), color=COLOURS[method], ls=DASHES[method], lw=1.6)


def ring_map(axis: Axes, runs: ToyRuns, rows: Sequence[int], title: str) -> None:
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
            width, alpha = (4.0, 0.6) if method == "llqr+sam" else (1.0, 1.0)
            axis.plot(path[:, 0], path[:, 1], color=COLOURS[method], zorder=4, lw=width, alpha=alpha)
            axis.plot(*path[-1], marker=MARKERS[method], color=COLOURS[method], ms=3, zorder=6)
        start = runs.trajectories["sgd"].positions[0, row]
        axis.plot(*start, marker="*", color="white", mec="black", mew=0.8, ms=11, zorder=5)
    axis.set(aspect="equal", xlabel=r"$\theta_1$", ylabel=r"$\theta_2$", title=title, xlim=(-reach, reach))
    axis.set_ylim(-reach, reach)


def ring_slice(axis: Axes, runs: ToyRuns, probes: Mapping[str, float]) -> None:
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

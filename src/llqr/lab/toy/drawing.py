"""How the toy figures look: colours that survive colour blindness and grey-scale printing, panels, legends."""

from collections.abc import Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

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

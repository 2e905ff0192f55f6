"""Convergence transfer under a bounded, changing metric."""

from collections.abc import Mapping
from functools import partial
from typing import Annotated

import numpy as np
import typer
from matplotlib.figure import Figure

from llqr.lab.pictures import styled
from llqr.lab.toy.drawing import COLOURS, GREEN, PURPLE, panels
from llqr.lab.toy.experiment import Progress, ToyResult
from llqr.theory import Transfer, transfer


def run_transfer(
    progress: Progress,
    steps: Annotated[int, typer.Option(min=200, help="Steps of each run.")] = 4000,
    batch: Annotated[int, typer.Option(min=1, help="Samples per minibatch.")] = 32,
) -> ToyResult:
    """Convergence transfer: the running mean of g.Ug under a bounded, changing metric."""
    runs = {}
    for power, shown in ((0.5, "1/2"), (0.25, "1/4")):
        for size, kind in ((None, "full gradient"), (batch, f"batches of {batch}")):
            name = f"{kind}, radius power {shown}"
            report = partial(progress, f"transfer, {name}")
            runs[name] = transfer(steps=steps, power=power, batch=size, progress=report)
    slopes = {name: run.slope() for name, run in runs.items()}
    every = np.unique(np.geomspace(1, steps, 60).astype(int))
    return ToyResult(
        "transfer",
        "Convergence transfer",
        [
            "Robust regression with the Cauchy loss (smooth, non-convex), a metric that changes inside [1/4, 4], step "
            "sizes and radii that decay; the proposition says that the running mean of g.Ug falls like T^-1/2.",
            "Fitted slopes: " + "; ".join(f"{name} {slope:.2f}" for name, slope in slopes.items()) + ".",
        ],
        {
            "steps": steps,
            "slopes": slopes,
            "T": every,
            "running_mean": {name: run.running_mean[every - 1] for name, run in runs.items()},
        },
        {"transfer": transfer_figure(runs)},
    )


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

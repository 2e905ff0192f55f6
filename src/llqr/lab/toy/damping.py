"""The noise-damping proposition: simulated variance and motion of a noisy mode against their closed forms."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from llqr.lab.pictures import styled, written_out
from llqr.lab.toy.drawing import COLOURS, panels
from llqr.lab.toy.experiment import Progress
from llqr.theory import one_step_motion, simulate_mode, stationary_variance
from llqr.theory.arguments import Array


def measure_damping(progress: Progress) -> tuple[dict[str, Any], Figure]:
    """The numbers and the figure of the proposition."""
    eta, lam, tau = 0.5, 1.0, 0.3
    d = np.geomspace(0.3, 4.0, 9)
    forms = {"variance": stationary_variance, "motion": one_step_motion}
    closed = {name: form(eta, lam, d, tau) for name, form in forms.items()}
    modes = []
    for done, value in enumerate(d, start=1):
        modes.append(simulate_mode(eta, lam, float(value), tau))
        progress("noise damping", done, len(d))
    measured = {key: np.array([getattr(mode, key) for mode in modes]) for key in closed}
    worst = max(float(np.abs(measured[key] / closed[key] - 1).max()) for key in closed)
    numbers = {
        "eta": eta, "lambda": lam, "tau": tau, "d": d.tolist(), "worst_relative_error": worst,
        "closed": {k: v.tolist() for k, v in closed.items()},
        "measured": {k: v.tolist() for k, v in measured.items()},
    }  # fmt: skip
    line = np.geomspace(d[0], d[-1], 200)
    smooth = {name: form(eta, lam, line, tau) for name, form in forms.items()}
    return numbers, damping_figure(d, measured, line, smooth)


@styled
def damping_figure(d: Array, measured: Mapping[str, Array], line: Array, closed: Mapping[str, Array]) -> Figure:
    """Measured at `d`, closed forms along `line`."""
    figure, axes = panels(2)
    names = {"variance": r"stationary variance of $z$", "motion": r"$E[(z_{t+1}-z_t)^2]$"}
    for axis, (key, label) in zip(axes, names.items(), strict=True):
        axis.plot(line, closed[key], color="black", lw=1.4, label="closed form")
        axis.plot(d, measured[key], color=COLOURS["llqr+sam"], marker="o", ms=4, lw=0, label=r"$10^6$ steps, simulated")
        axis.set(xscale="log", yscale="log", xlabel=r"metric denominator $d$", ylabel=label)
        written_out(axis.xaxis, (0.3, 0.5, 1, 2, 4))
        axis.legend(loc="upper right")
    return figure

"""The second toy figure: ejection from the bottom of the sharp well by gradient noise.

With it the noise-damping proposition: simulated variance and motion of a noisy mode against their closed forms.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from scipy.signal import lfilter

from llqr.lab.pictures import styled, written_out
from llqr.lab.toy.drawing import COLOURS, GREEN, LABELS, MARKERS, band, method_handles, panels, ring_map, shared_legend
from llqr.lab.toy.experiment import ToyResult, claim_shares, statistics
from llqr.lab.toy.ring import FIGURE_CONSTANTS, NOISE_VARIANCE, ToyRuns, ejection
from llqr.theory import METHODS, one_step_motion, stationary_variance
from llqr.theory.arguments import Array
from llqr.theory.noise_damping import stable


@dataclass(frozen=True)
class NoisyMode:
    """Averages over a simulated run."""

    variance: float
    motion: float


def simulate_mode(
    eta: float, lam: float, d: float, tau: float, *, steps: int = 1_000_000, chains: int = 8, seed: int = 0
) -> NoisyMode:
    """`steps` steps of the recursion `z <- q z - eta eps / d` in each of `chains` chains, started at stationarity."""
    e, l, denominator = (float(value) for value in stable(eta, lam, d))
    q = 1 - e * l / denominator
    rng = np.random.default_rng(seed)
    start = rng.standard_normal((1, chains)) * np.sqrt(float(stationary_variance(eta, lam, d, tau)))
    kicks = -e / denominator * tau * rng.standard_normal((steps, chains))
    path, _ = lfilter([1.0], [1.0, -q], kicks, axis=0, zi=q * start)
    moves = np.diff(path, axis=0, prepend=start)
    return NoisyMode(float((path**2).mean()), float((moves**2).mean()))


def run_noise(anisotropy: float = 1.0, seeds: int = 32, steps: int = 1200) -> ToyResult:
    """Ejection from the bottom of the well by gradient noise, and the noise-damping proposition."""
    constants = replace(FIGURE_CONSTANTS, anisotropy=anisotropy)
    runs = ejection(constants, seeds, steps)
    claims = claim_shares(runs.ejection_claims())
    paths = {}
    for method, run in runs.trajectories.items():
        paths[method] = {"to_flat": statistics(runs.path_to_flat(method)), "total": statistics(run.path_length())}
    ratio = runs.path_to_flat("sam") / runs.path_to_flat("llqr+sam")
    damping, damping_figure = measure_damping()
    return ToyResult(
        {
            "constants": constants, "seeds": seeds, "steps": steps, "variance": NOISE_VARIANCE, "claims": claims,
            "path_length": paths, "path_ratio": statistics(ratio),
            "path_to_flat": {m: runs.path_to_flat(m) for m in ("sam", "llqr+sam")}, "damping": damping,
        },
        {"noise" if anisotropy == 1 else "noise-anisotropic": ejection_figure(runs), "damping": damping_figure},
    )  # fmt: skip


@styled
def ejection_figure(runs: ToyRuns) -> Figure:
    figure, (map_, radius, path) = panels(3)
    ring_map(map_, runs, [0], "seed 0, from the bottom (star)")
    for method in METHODS:
        values = runs.trajectories[method].positions.norm(dim=-1).numpy()
        band(radius, values, method)
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
    written_out(path.yaxis, (2, 5, 10, 20, 50, 100, 200))
    path.set_title("all seeds, noise shared by the methods")
    shared_legend(figure, [*method_handles(), Line2D([], [], color=GREEN, lw=1.2, label="flat basin")])
    return figure


def measure_damping() -> tuple[dict[str, Any], Figure]:
    """The numbers and the figure of the proposition."""
    eta, lam, tau = 0.5, 1.0, 0.3
    d = np.geomspace(0.3, 4.0, 9)
    forms = {"variance": stationary_variance, "motion": one_step_motion}
    closed = {name: form(eta, lam, d, tau) for name, form in forms.items()}
    modes = [simulate_mode(eta, lam, float(value), tau) for value in d]
    measured = {key: np.array([getattr(mode, key) for mode in modes]) for key in closed}
    worst = max(float(np.abs(measured[key] / closed[key] - 1).max()) for key in closed)
    numbers = {
        "eta": eta, "lambda": lam, "tau": tau, "d": d, "worst_relative_error": worst,
        "closed": closed, "measured": measured,
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

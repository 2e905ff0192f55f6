"""Selection between wells: the regenerative model, and mean exit times of the real optimizers."""

from collections.abc import Mapping
from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt
import torch
from matplotlib.figure import Figure

from llqr.lab.pictures import styled, written_out
from llqr.lab.toy.drawing import COLOURS, DASHES, GREEN, GREY, MARKERS, method_handles, panels, shared_legend
from llqr.lab.toy.experiment import ToyResult
from llqr.lab.toy.phase import PhaseSettings, exit_steps
from llqr.theory import Method, flat_exit_lower_bound, sharp_exit_upper_bound
from llqr.theory.arguments import Array, at_least, positive


def simulate_exit_times(growth: npt.ArrayLike, sigma: float, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Simulated exit times from wells of radius 1, one visit per entry of `growth`."""
    a = at_least("growth", growth, 1.0).ravel()
    positive("sigma", sigma)
    e = np.zeros(a.shape)
    times = np.zeros(a.shape, dtype=np.int64)
    inside = np.arange(a.size)
    step = 0
    while inside.size:
        step += 1
        e = a[inside] * e + sigma * rng.standard_normal(inside.size)
        out = np.abs(e) >= 1
        times[inside[out]] = step
        inside, e = inside[~out], e[~out]
    return times


@dataclass(frozen=True)
class Selection:
    """Occupation of the sharp wells of radius 1 at noise scales `sigma`: simulated, and its upper bound."""

    sigma: Array
    simulated: Array
    bound: Array
    flat_time: Array
    sharp_time: Array

    @property
    def rate(self) -> Array:
        """`sigma^2 log(R / sigma) / R^2`, the proposition's rate, with `R = 1`."""
        return self.sigma**2 * np.log(1 / self.sigma)

    @property
    def slope_in_rate(self) -> float:
        """Slope of `log(occupation)` against the log of the proposition's rate; 1 if it falls at that rate."""
        return _slope(np.log(self.rate), np.log(self.simulated))

    @property
    def slope_in_sigma(self) -> float:
        """Slope against `log sigma`: 2, minus the effect of the logarithm."""
        return _slope(np.log(self.sigma), np.log(self.simulated))


def select(sigma: npt.ArrayLike, *, sharp_fraction: float = 0.5, cycles: int = 8000) -> Selection:
    """Run `cycles` cycles at each noise scale; a cycle picks a sharp well with probability `sharp_fraction`."""
    scales = positive("sigma", sigma).ravel()
    if not 0 < sharp_fraction < 1:
        raise ValueError(f"sharp_fraction must lie strictly between 0 and 1, got {sharp_fraction!r}.")
    R, growth, rng = 1.0, 1.5, np.random.default_rng(0)
    columns = []
    for scale in scales:
        sharp = rng.random(cycles) < sharp_fraction
        times = simulate_exit_times(np.where(sharp, growth, 1.0), float(scale), rng)
        most = sharp_fraction * sharp_exit_upper_bound(float(scale), R, growth)
        least = (1 - sharp_fraction) * float(flat_exit_lower_bound(scale, R))
        share = times[sharp].sum() / times.sum()
        columns.append((share, most / (most + least), times[~sharp].mean(), times[sharp].mean()))
    simulated, bound, flat_time, sharp_time = np.array(columns, dtype=np.float64).T
    return Selection(scales, simulated, bound, flat_time, sharp_time)


def _slope(x: Array, y: Array) -> float:
    return float(np.polyfit(x, y, 1)[0])


@dataclass(frozen=True)
class ExitSettings(PhaseSettings):
    """One pothole on a slope and one learning rate, for SAM and LLQR+SAM alike."""

    lambda_eps: float = 20.0
    eta: float = 0.005
    steps: int = 2000
    """Runs are cut off here: a mean that includes unfinished visits is a lower bound."""
    lambda_bar: float = 0.25


@dataclass(frozen=True)
class ExitTimes:
    """Exit times (in steps) at every pair of `rho` and `sigma`: the mean over seeds and the fraction cut off."""

    rho: Array
    sigma: Array
    mean: Array
    cut: Array


def exit_times(
    method: Method, rho: npt.ArrayLike, sigma: npt.ArrayLike, *, seeds: int, settings: ExitSettings
) -> ExitTimes:
    """Start `seeds` iterates at the bottom of the well for each pair `(rho[i], sigma[i])` and time their exit.

    `sigma` is the standard deviation of the noise in the update gradient, before the metric transports it.
    """
    radii, scales = np.broadcast_arrays(positive("rho", rho), positive("sigma", sigma))
    cells = len(radii)
    landscape = settings.landscape(settings.lambda_bar)
    deviation = torch.tensor(scales).repeat_interleave(seeds).unsqueeze(-1)
    generator = torch.Generator().manual_seed(0)
    start = torch.full((cells * seeds, 1), float(landscape.minimum), dtype=torch.float64)

    def noise(step: int) -> torch.Tensor:
        return deviation * torch.randn(cells * seeds, 1, generator=generator, dtype=torch.float64)

    times = exit_steps(method, landscape, start, torch.tensor(radii).repeat_interleave(seeds), settings, noise)
    cut = (times > settings.steps).view(cells, seeds).double().mean(1)
    mean = times.clamp(max=settings.steps).view(cells, seeds).double().mean(1)
    return ExitTimes(radii, scales, mean.numpy(), cut.numpy())


def run_selection(cycles: int = 8000, seeds: int = 64, steps: int = 2000) -> ToyResult:
    """Occupation of sharp wells in the regenerative model, and mean exit times of the real optimizers."""
    selection = select(np.geomspace(0.01, 0.1, 10), cycles=cycles)
    settings = ExitSettings(steps=steps)
    rho, sigma = np.geomspace(0.2, 2.0, 14), np.geomspace(0.05, 50.0, 13)
    # Between the two thresholds: LLQR+SAM's envelope extends past the well, SAM's does not.
    between = 0.65 * settings.r_eps
    radii, scales = np.r_[rho, np.full_like(sigma, between)], np.r_[np.full_like(rho, 0.5), sigma]
    over_rho, over_sigma = {}, {}
    for method in ("sam", "llqr+sam"):
        times = exit_times(method, radii, scales, seeds=seeds, settings=settings)
        over_rho[method] = ExitTimes(*(part[: len(rho)] for part in astuple(times)))
        over_sigma[method] = ExitTimes(*(part[len(rho) :] for part in astuple(times)))
    thresholds = {"sam": settings.r_eps, "llqr+sam": settings.r_eps * float(np.sqrt(settings.lambda_bar))}
    first_out = {method: _first_out(times) for method, times in over_rho.items()}
    closest = 1 - float((selection.simulated / selection.bound).max())
    leaves_after = float(over_sigma["llqr+sam"].mean[0])
    return ToyResult(
        {
            **vars(selection), "slope_in_rate": selection.slope_in_rate, "slope_in_sigma": selection.slope_in_sigma,
            "cycles": cycles, "exit_from_rho": first_out, "exit_settings": settings, "exit_over_rho": over_rho,
            "exit_over_sigma": over_sigma, "below_bound_by": closest,
            "thresholds": thresholds, "between": {"rho": between, "llqr+sam_leaves_after": leaves_after},
        },
        {"selection": selection_figure(selection, over_rho, over_sigma, thresholds, settings.steps)},
    )  # fmt: skip


def _first_out(times: ExitTimes) -> float | None:
    """The smallest radius at which most visits ended before they were cut off."""
    ended = times.rho[times.cut < 0.5]
    return float(ended.min()) if ended.size else None


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
            colour, marker = COLOURS[method], MARKERS[method]
            axis.plot(x, times.mean, color=colour, ls=DASHES[method], lw=1.2, marker=marker, ms=4)
        axis.axhline(cut_at, color=GREY, ls=":", lw=1)
        axis.set(xscale="log", yscale="log", ylabel="mean exit time (steps)")
    for method, threshold in thresholds.items():
        rho.axvline(threshold, color=COLOURS[method], lw=0.9, ls=":")
    written_out(rho.xaxis, (0.2, 0.5, 1, 2))
    written_out(occupied.xaxis, (0.01, 0.02, 0.05, 0.1))
    written_out(occupied.yaxis, (0.001, 0.003, 0.01, 0.03, 0.1))
    rho.set(xlabel=r"probe radius $\rho$ (units of $r_\epsilon$)", title="vertical: envelope = $r_\\epsilon$")
    sigma.set(xlabel=r"gradient noise $\sigma$", title=f"grey: runs are cut at {cut_at} steps")
    shared_legend(figure, method_handles(("sam", "llqr+sam")))
    return figure

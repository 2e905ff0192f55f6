"""Hovering: two-cycle amplitudes measured with the optimizers, against their closed forms."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from matplotlib.figure import Figure

from llqr.lab.pictures import styled
from llqr.lab.toy.drawing import COLOURS, DASHES, GREY, MARKERS, method_handles, panels, shared_legend
from llqr.lab.toy.experiment import ToyResult
from llqr.theory import (
    Method,
    amplification,
    hovering_envelope,
    perceived_sharpness,
    simulate,
    two_cycle_amplitude,
    vanilla_two_cycle_amplitude,
)
from llqr.theory.arguments import Array


@dataclass(frozen=True)
class Hovering:
    """Amplitudes of the two-cycle in wells `(lambda_bar, lambda_eps)`: measured, and in closed form."""

    lambda_bar: Array
    lambda_eps: Array
    measured: Array
    predicted: Array

    @property
    def worst_error(self) -> float:
        """Largest relative error."""
        return float(np.abs(self.measured / self.predicted - 1).max())


def hover(
    method: Method, lambda_bar: npt.ArrayLike, lambda_eps: npt.ArrayLike, *, eta: float, rho: float, steps: int = 2000
) -> Hovering:
    """Run `sam` or `llqr+sam` in one-dimensional quadratic wells, one per entry, and measure the final amplitude."""
    bar, eps = (np.ascontiguousarray(a, dtype=np.float64).ravel() for a in np.broadcast_arrays(lambda_bar, lambda_eps))
    if method == "sam":
        predicted = vanilla_two_cycle_amplitude(eta, rho, bar * perceived_sharpness(bar, eps))
    elif method == "llqr+sam":
        predicted = two_cycle_amplitude(eta, rho, bar, eps)
    else:
        raise ValueError(f"method must be 'sam' or 'llqr+sam' to hover, got {method!r}.")
    return Hovering(bar, eps, np.abs(positions(method, bar, eps, 1.0, eta, rho, steps)[-1]), predicted)


def positions(method: Method, bar: Array, eps: Array, start: float, eta: float, rho: float, steps: int) -> Array:
    """From `start` in one-dimensional quadratic wells: `(steps + 1, wells)`."""
    sharpness, metric = torch.from_numpy(bar + eps), torch.from_numpy(bar).unsqueeze(-1)
    points = torch.full((len(bar), 1), start, dtype=torch.float64)
    run = simulate(
        method, lambda z: 0.5 * sharpness * z.squeeze(-1) ** 2, points,
        lr=eta, rho=rho, steps=steps, metric=lambda gradient: gradient / metric,
    )  # fmt: skip
    return np.asarray(run.positions[:, :, 0])


def run_hover() -> ToyResult:
    """Hovering: two-cycle amplitudes of SAM and LLQR+SAM, measured and in closed form."""
    lambda_bar, lambda_eps, eta, rho = 0.25, 5.0, 0.04, 0.2
    one_well = np.array([lambda_bar]), np.array([lambda_eps])
    series = {method: positions(method, *one_well, 1.2 * rho, eta, rho, 60)[:, 0] for method in ("sam", "llqr+sam")}
    envelopes = {"sam": rho, "llqr+sam": float(hovering_envelope(rho, lambda_bar))}
    bars = np.geomspace(lambda_bar / 3, 20 * lambda_bar, 12)
    wells = {method: hover(method, bars, lambda_eps, eta=eta / 4, rho=rho) for method in ("sam", "llqr+sam")}
    rates = np.linspace(0.05, 1.9, 24)
    # The same rates from wells of very different sharpness: the ratio to the envelope depends on eta mu alone.
    eps = np.where(np.arange(24) % 2 == 0, 0.5, 50.0)
    spread = hover("llqr+sam", eps / (rates / eta - 1), eps, eta=eta, rho=rho, steps=1000)
    ratio = spread.measured / hovering_envelope(rho, spread.lambda_bar)
    worst = max(well.worst_error for well in (*wells.values(), spread))
    return ToyResult(
        {
            "lambda_bar": lambda_bar, "lambda_eps": lambda_eps, "eta": eta, "rho": rho, "envelopes": envelopes,
            "worst_relative_error": worst, "amplification": float(amplification(lambda_bar)),
            "series": series, "wells": wells,
            "collapse": {"eta_mu": rates, "amplitude_over_envelope": ratio},
        },
        {"hover": hover_figure(series, envelopes, wells, (rates, ratio))},
    )  # fmt: skip


@styled
def hover_figure(
    series: Mapping[str, Array], envelopes: Mapping[str, float], wells: Mapping[str, Hovering],
    collapse: tuple[Array, Array],
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

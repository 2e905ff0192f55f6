"""The toy experiments: each computes, draws its figures, and says in two or three sentences what came out."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from llqr.lab.toy import figures
from llqr.theory import (
    METHODS,
    SHOWN,
    PhaseSettings,
    amplification,
    ejection,
    escape,
    escape_diagram,
    finite_rate_envelope,
    hover,
    hovering_envelope,
    one_step_motion,
    rate_diagram,
    select,
    simulate,
    simulate_mode,
    stationary_variance,
    transfer,
    vanilla_envelope,
)
from llqr.theory.exits import ExitSettings, ExitTimes, exit_times
from llqr.theory.search import as_dict

Progress = Callable[[str, int, int], None]
"""What is being done, how much of it, out of how much."""


@dataclass(frozen=True)
class Result:
    """What a toy command leaves behind."""

    name: str
    title: str
    sentences: list[str]
    numbers: dict[str, Any]
    figures: dict[str, Figure]


def run_escape(starts: int, steps: int, anisotropy: float, seed: int) -> Result:
    """The first toy figure: leaving the sharp well from inside it."""
    constants = replace(SHOWN, anisotropy=anisotropy)
    runs = escape(constants, starts=starts, steps=steps, seed=seed)
    claims = _shares(runs.escape_claims())
    flat = {method: _statistics(runs.flat_step(method).double()) for method in ("sam", "llqr+sam")}
    decay = {method: float(runs.losses(method).mean()) for method in METHODS}
    return Result(
        "escape",
        "Escape from the sharp well",
        [
            f"{starts} starts inside the annular well, off its bottom; one learning rate {constants.lr:g} for all four "
            f"methods, one radius {constants.rho:g} for the SAM pair, U = inverse of the bowl's curvature.",
            _claims_sentence(claims),
            f"Steps to the flat basin, median over starts: {flat['llqr+sam']['median']:.0f} for LLQR+SAM, "
            f"{flat['sam']['median']:.0f} for SAM; mean loss over the run {decay['llqr+sam']:.3f} against "
            f"{decay['sam']:.3f}.",
        ],
        {
            "constants": as_dict(constants), "starts": starts, "steps": steps, "seed": seed, "claims": claims,
            "steps_to_flat": flat, "mean_loss": decay,
            "loss_curves": {m: _quantiles(runs.losses(m)) for m in METHODS},
        },
        {"escape": figures.escape_figure(runs)},
    )  # fmt: skip


def run_noise(seeds: int, steps: int, variance: float, anisotropy: float, progress: Progress) -> Result:
    """The second toy figure, ejection by gradient noise, and the noise-damping proposition beside it."""
    constants = replace(SHOWN, anisotropy=anisotropy)
    runs = ejection(constants, seeds=seeds, steps=steps, variance=variance)
    claims = _shares(runs.ejection_claims())
    paths = {
        method: {
            "to_flat": _statistics(runs.path_to_flat(method)),
            "total": _statistics(runs.trajectories[method].path_length()),
        }
        for method in METHODS
    }
    ratio = runs.path_to_flat("sam") / runs.path_to_flat("llqr+sam")
    damping, damping_figure = _damping(progress)
    return Result(
        "noise",
        "Ejection by gradient noise",
        [
            f"From the bottom of the well, with Gaussian noise of variance {variance:g} in the update gradient (before "
            f"U transports it), one schedule a seed shared by the four methods, {seeds} seeds.",
            _claims_sentence(claims),
            "Path length until the flat basin is first entered, median: "
            f"{paths['llqr+sam']['to_flat']['median']:.2f} for LLQR+SAM, "
            f"{paths['sam']['to_flat']['median']:.2f} for SAM; over the whole run "
            f"{paths['llqr+sam']['total']['median']:.2f} and {paths['sam']['total']['median']:.2f}. SAM's path is "
            f"{float(ratio.min()):.2f} to {float(ratio.max()):.2f} times as long (median {float(ratio.median()):.2f}).",
            f"Noise damping: variance and one-step motion of a noisy mode agree with the closed forms to "
            f"{100 * damping['worst_relative_error']:.2f}% at 10^6 steps.",
        ],
        {
            "constants": as_dict(constants), "seeds": seeds, "steps": steps, "variance": variance, "claims": claims,
            "path_length": paths, "path_ratio": _statistics(ratio),
            "path_to_flat": {m: runs.path_to_flat(m).tolist() for m in ("sam", "llqr+sam")}, "damping": damping,
        },
        {"noise": figures.ejection_figure(runs), "damping": damping_figure},
    )  # fmt: skip


def run_phase(rows: int, columns: int, steps: int, progress: Progress) -> Result:
    """Escape phase diagrams over (rho, lambda_bar), and over the learning rate."""
    settings = PhaseSettings(steps=steps)
    bar, rho = np.geomspace(0.1, 2.0, rows), np.geomspace(0.05, 4.0, columns)
    diagrams, finite = {}, {}
    for method in ("sam", "llqr+sam"):
        report = _part(progress, f"phase diagram of {figures.LABELS[method]}")
        diagrams[method] = escape_diagram(method, bar, rho, settings, report)
        sharpness = bar + settings.lambda_eps
        rate = settings.eta * (sharpness if method == "sam" else sharpness / bar)
        finite[method] = finite_rate_envelope(rate, settings) * (1 if method == "sam" else np.sqrt(bar))
    rates = np.geomspace(0.05, 2.5, rows)
    over_rate = rate_diagram(
        rates, np.geomspace(0.1, 4.0, columns), settings, progress=_part(progress, "learning rates")
    )
    finite_rate = finite_rate_envelope(rates, settings)
    breaks = float(rates[np.argmax(over_rate.boundary < 0.8 * settings.r_eps)])
    unstable = float(rates[np.argmax(over_rate.escaped.all(1))])
    numbers = {
        method: {
            "agreement": diagram.agreement,
            "agreement_off_line": diagram.agreement_off_line,
            "agreement_finite_rate": diagram.agreement_with(finite[method]),
            "monotone": diagram.monotone,
            "boundary_rho": diagram.boundary.tolist(),
            "finite_rate_rho": finite[method].tolist(),
            "escaped": diagram.escaped.astype(int).tolist(),
        }
        for method, diagram in diagrams.items()
    }
    both = {method: f"{100 * numbers[method]['agreement_off_line']:.1f}%" for method in diagrams}
    return Result(
        "phase",
        "Escape phase diagrams",
        [
            f"One pothole on a slope per cell, {rows} x {columns} cells, learning rate {settings.eta:g}. The line "
            f"envelope = r_eps predicts {100 * numbers['sam']['agreement']:.1f}% of all cells for SAM and "
            f"{100 * numbers['llqr+sam']['agreement']:.1f}% for LLQR+SAM; {both['sam']} and {both['llqr+sam']} of the "
            "cells that do not touch the line.",
            "What remains lies just left of the line. An iterate that hovers makes its probe look 2 / (2 - eta mu) "
            "envelopes far, the slope moves the minimum downhill, and the rim of the well does not pull: the dashed "
            f"line has all three, and agrees with {100 * numbers['sam']['agreement_finite_rate']:.1f}% and "
            f"{100 * numbers['llqr+sam']['agreement_finite_rate']:.1f}% of all cells.",
            "Over the learning rate the envelope argument stops holding as eta mu grows: from eta mu = "
            f"{breaks:.2f} on iterates leave wells a quarter wider than the envelope, and from {unstable:.2f} on they "
            f"leave every well of the diagram. The line r_eps explains {100 * over_rate.agreement:.1f}% of the cells, "
            "the dashed line "
            f"{100 * over_rate.agreement_with(finite_rate):.1f}%.",
        ],
        {
            "settings": asdict(settings), "lambda_bar": bar.tolist(), "rho": rho.tolist(), "diagrams": numbers,
            "learning_rate": {
                "eta_mu": rates.tolist(), "envelope": over_rate.columns.tolist(),
                "agreement": over_rate.agreement, "agreement_finite_rate": over_rate.agreement_with(finite_rate),
                "envelope_argument_fails_from": breaks, "all_leave_from": unstable,
                "boundary_envelope": [None if np.isnan(b) else float(b) for b in over_rate.boundary],
                "finite_rate_envelope": finite_rate.tolist(), "escaped": over_rate.escaped.astype(int).tolist(),
            },
        },
        {
            "phase": figures.phase_figure(diagrams, settings.r_eps, finite),
            "rate": figures.rate_figure(over_rate, settings.r_eps, finite_rate),
        },
    )  # fmt: skip


def run_hover(lambda_bar: float, lambda_eps: float, eta: float, rho: float) -> Result:
    """Hovering: two-cycle amplitudes measured by the optimizers, beside their closed forms."""
    sharpness = lambda_bar + lambda_eps
    series = {
        method: simulate(
            method, lambda z: 0.5 * sharpness * z.squeeze(-1) ** 2, torch.full((1, 1), 1.2 * rho, dtype=torch.float64),
            lr=eta, rho=rho, steps=60, metric=lambda gradient: gradient / lambda_bar,
        ).positions[:, 0, 0].numpy()
        for method in ("sam", "llqr+sam")
    }  # fmt: skip
    envelopes = {"sam": float(vanilla_envelope(rho)), "llqr+sam": float(hovering_envelope(rho, lambda_bar))}
    bars = np.geomspace(lambda_bar / 3, 20 * lambda_bar, 12)
    wells = {method: hover(method, bars, lambda_eps, eta=eta / 4, rho=rho) for method in ("sam", "llqr+sam")}
    rates = np.linspace(0.05, 1.9, 24)
    # The same rates from wells of very different sharpness: the ratio to the envelope knows only eta mu.
    eps = np.where(np.arange(24) % 2 == 0, 0.5, 50.0)
    spread = hover("llqr+sam", eps / (rates / eta - 1), eps, eta=eta, rho=rho, steps=1000)
    ratio = spread.measured / hovering_envelope(rho, spread.lambda_bar)
    worst = max(well.worst_error for well in (*wells.values(), spread))
    return Result(
        "hover",
        "Hovering",
        [
            f"In a quadratic well (average curvature {lambda_bar:g}, localized sharpness {lambda_eps:g}) SAM and "
            f"LLQR+SAM end in a two-cycle. Envelopes: {envelopes['sam']:.3f} and {envelopes['llqr+sam']:.3f}, "
            f"amplified by {float(amplification(lambda_bar)):.2f}.",
            "Amplitudes measured by the optimizers agree with eta rho mu / ((2 - eta mu) sqrt(lambda_bar)) and with "
            f"SAM's eta rho lambda / (2 - eta lambda) to a relative {worst:.1e} in {2 * len(bars) + len(rates)} wells.",
            "The ratio of amplitude to envelope is a function of eta mu alone: the localized sharpness cancels out.",
        ],
        {
            "lambda_bar": lambda_bar, "lambda_eps": lambda_eps, "eta": eta, "rho": rho, "envelopes": envelopes,
            "worst_relative_error": worst,
            "series": {method: z.tolist() for method, z in series.items()},
            "wells": {
                method: {k: v.tolist() for k, v in asdict(well).items()} for method, well in wells.items()
            },
            "collapse": {"eta_mu": rates.tolist(), "amplitude_over_envelope": ratio.tolist()},
        },
        {"hover": figures.hover_figure(series, envelopes, wells, (rates, ratio))},
    )  # fmt: skip


def run_selection(cycles: int, seeds: int, steps: int, progress: Progress) -> Result:
    """The regenerative selection model, and mean exit times of the real optimizers."""
    progress("regenerative model", 0, 1)
    selection = select(np.geomspace(0.01, 0.1, 10), cycles=cycles)
    progress("regenerative model", 1, 1)
    settings = ExitSettings(steps=steps)
    rho, sigma = np.geomspace(0.2, 2.0, 14), np.geomspace(0.05, 50.0, 13)
    # Between the two thresholds: LLQR+SAM's envelope reaches past the well, SAM's does not.
    between = 0.65 * settings.r_eps
    over_rho, over_sigma = {}, {}
    for method in ("sam", "llqr+sam"):
        times = exit_times(
            method, np.r_[rho, np.full_like(sigma, between)], np.r_[np.full_like(rho, 0.5), sigma],
            seeds=seeds, settings=settings, progress=_part(progress, f"exit times of {figures.LABELS[method]}"),
        )  # fmt: skip
        first, second = slice(0, len(rho)), slice(len(rho), None)
        over_rho[method] = ExitTimes(times.rho[first], times.sigma[first], times.mean[first], times.cut[first])
        over_sigma[method] = ExitTimes(times.rho[second], times.sigma[second], times.mean[second], times.cut[second])
    thresholds = {"sam": settings.r_eps, "llqr+sam": settings.r_eps * float(np.sqrt(settings.lambda_bar))}
    first_out = {method: _first_out(times) for method, times in over_rho.items()}
    shown_out = {method: "(none)" if rho is None else f"{rho:.2f}" for method, rho in first_out.items()}
    closest = 1 - float((selection.simulated / selection.bound).max())
    beside = {method: float(over_sigma[method].mean[0]) for method in over_sigma}
    return Result(
        "selection",
        "Selection between wells",
        [
            f"Regenerative model, {cycles} cycles a noise scale: the time spent in sharp wells stays below its bound "
            f"(by {100 * closest:.1f}% at the closest) and falls with slope "
            f"{selection.slope_in_rate:.3f} in sigma^2 log(R / sigma) / R^2, {selection.slope_in_sigma:.2f} in sigma.",
            f"Mean exit times from a pothole by the real optimizers ({seeds} seeds a point): most visits end from "
            f"rho = {shown_out['sam']} on with SAM, from {shown_out['llqr+sam']} on with LLQR+SAM; the envelopes reach "
            f"r_eps at {thresholds['sam']:.2f} and {thresholds['llqr+sam']:.2f}.",
            f"At rho = {between:g}, between the two, LLQR+SAM leaves after {beside['llqr+sam']:.0f} steps at the "
            f"smallest noise, when {100 * float(over_sigma['sam'].cut[0]):.0f}% of SAM's visits last beyond "
            f"{settings.steps}.",
        ],
        {
            "sigma": selection.sigma.tolist(), "simulated": selection.simulated.tolist(),
            "bound": selection.bound.tolist(), "slope_in_rate": selection.slope_in_rate,
            "slope_in_sigma": selection.slope_in_sigma, "flat_time": selection.flat_time.tolist(),
            "sharp_time": selection.sharp_time.tolist(), "cycles": cycles,
            "exit_from_rho": first_out, "exit_settings": asdict(settings),
            "exit_over_rho": {m: {k: v.tolist() for k, v in asdict(t).items()} for m, t in over_rho.items()},
            "exit_over_sigma": {m: {k: v.tolist() for k, v in asdict(t).items()} for m, t in over_sigma.items()},
        },
        {"selection": figures.selection_figure(selection, over_rho, over_sigma, thresholds, settings.steps)},
    )  # fmt: skip


def run_transfer(steps: int, batch: int, progress: Progress) -> Result:
    """Convergence transfer under a bounded, changing metric."""
    runs = {}
    for power, shown in ((0.5, "1/2"), (0.25, "1/4")):
        for size, kind in ((None, "full gradient"), (batch, f"batches of {batch}")):
            name = f"{kind}, radius power {shown}"
            report = _part(progress, f"transfer, {name}")
            runs[name] = transfer(steps=steps, power=power, batch=size, progress=report)
    slopes = {name: run.slope() for name, run in runs.items()}
    every = np.unique(np.geomspace(1, steps, 60).astype(int))
    return Result(
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
            "T": every.tolist(),
            "running_mean": {name: run.running_mean[every - 1].tolist() for name, run in runs.items()},
        },
        {"transfer": figures.transfer_figure(runs)},
    )


def _damping(progress: Progress) -> tuple[dict[str, Any], Figure]:
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
    return numbers, figures.damping_figure(d, measured, line, smooth)


def _first_out(times: ExitTimes) -> float | None:
    """The smallest radius at which most visits ended before they were cut."""
    ended = times.rho[times.cut < 0.5]
    return float(ended.min()) if ended.size else None


def _part(progress: Progress, what: str) -> Callable[[int, int], None]:
    return lambda done, total: progress(what, done, total)


def _shares(claims: dict[str, torch.Tensor]) -> dict[str, float]:
    return {claim: float(holds.double().mean()) for claim, holds in claims.items()}


def _claims_sentence(claims: dict[str, float]) -> str:
    return "; ".join(f"{claim}: {100 * share:.0f}% of runs" for claim, share in claims.items()) + "."


def _statistics(values: torch.Tensor) -> dict[str, float]:
    return {"min": float(values.min()), "median": float(values.median()), "max": float(values.max())}


def _quantiles(values: torch.Tensor) -> dict[str, list[float]]:
    """At log-spaced steps, so that the file stays readable."""
    steps = np.unique(np.geomspace(1, len(values), 40).astype(int)) - 1
    chosen = values[torch.from_numpy(steps)]
    return {
        "step": steps.tolist(),
        "min": chosen.amin(1).tolist(),
        "median": chosen.median(1).values.tolist(),
        "max": chosen.amax(1).tolist(),
    }

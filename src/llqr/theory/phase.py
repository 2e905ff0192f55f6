"""Measured escape phase diagrams: in which cells of a grid does the iterate leave its pothole?

Every cell is one row of a real optimizer: a pothole on a slope (`PotholeOnSlope`), started next to the bottom of the
well. A cell counts as escaped once its iterate has been outside the well. `rho / sqrt(lambda_bar) = r_eps` is the
paper's line for LLQR+SAM, `rho = r_eps` its line for SAM.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from llqr.theory.arguments import Array, positive
from llqr.theory.landscapes import Number, Pothole, PotholeOnSlope
from llqr.theory.trajectories import Method, iterate

Cells = npt.NDArray[np.bool_]
Progress = Callable[[int, int], None]


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

    def __post_init__(self) -> None:
        for name in ("r_eps", "lambda_eps", "tilt_fraction", "eta"):
            positive(name, getattr(self, name))
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}.")

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
    method: Method,
    lambda_bar: npt.ArrayLike,
    rho: npt.ArrayLike,
    settings: PhaseSettings = PhaseSettings(),
    progress: Progress = lambda done, total: None,
) -> PhaseDiagram:
    """Rows are `lambda_bar`, columns `rho`, one learning rate for all cells."""
    bar, radius = positive("lambda_bar", lambda_bar), positive("rho", rho)
    grid_bar, grid_rho = np.meshgrid(bar, radius, indexing="ij")
    escaped = simulated_escapes(method, grid_bar.ravel(), grid_rho.ravel(), settings, progress=progress)
    envelope = grid_rho / np.sqrt(grid_bar) if method == "llqr+sam" else grid_rho
    return PhaseDiagram(bar, radius, escaped.reshape(grid_bar.shape), envelope > settings.r_eps)


def rate_diagram(
    rate: npt.ArrayLike,
    envelope: npt.ArrayLike,
    settings: PhaseSettings = PhaseSettings(),
    lambda_bar: float = 0.5,
    progress: Progress = lambda done, total: None,
) -> PhaseDiagram:
    """LLQR+SAM over the learning rate: rows are `eta mu`, columns the envelope `rho / sqrt(lambda_bar)`.

    An optimizer has one learning rate, so each row of the diagram uses its own optimizer. `settings.eta` is not used,
    and each row runs long enough for the slope alone to carry an iterate out of the well.
    """
    rates, reach = positive("rate", rate), positive("envelope", envelope)
    mu = 1 + settings.lambda_eps / lambda_bar
    cells = []
    for done, value in enumerate(rates):
        steps = int(np.ceil(4 / (value * settings.tilt_fraction))) + 100
        at = replace(settings, eta=float(value / mu), steps=steps)
        cells.append(simulated_escapes("llqr+sam", np.full_like(reach, lambda_bar), reach * np.sqrt(lambda_bar), at))
        progress(done + 1, len(rates))
    predicted = np.broadcast_to(reach > settings.r_eps, (len(rates), len(reach)))
    return PhaseDiagram(rates, reach, np.stack(cells), predicted.copy())


def finite_rate_envelope(rate: npt.ArrayLike, settings: PhaseSettings) -> Array:
    """The envelope above which the *probe* of a hovering iterate leaves the restoring part: `(1 - eta mu / 2)` of it.

    From `probe_reach`: a probe reaches `2 / (2 - eta mu)` envelopes. Zero from `eta mu = 2` on, where plain descent
    leaves the well too.
    """
    return np.maximum(settings.restoring_radius * (1 - positive("rate", rate) / 2), 0.0)


def simulated_escapes(
    method: Method,
    lambda_bar: Array,
    rho: Array,
    settings: PhaseSettings,
    progress: Progress = lambda done, total: None,
) -> Cells:
    """Which of the potholes `(lambda_bar[i], rho[i])` the method leaves within `settings.steps` steps."""
    bar = torch.from_numpy(np.ascontiguousarray(lambda_bar))
    landscape = settings.landscape(bar)
    start = torch.as_tensor(landscape.minimum - 1e-6 * settings.r_eps).unsqueeze(-1)
    times = exit_steps(method, landscape, start, torch.from_numpy(np.ascontiguousarray(rho)), settings, progress)
    return (times <= settings.steps).numpy()


def exit_steps(
    method: Method,
    landscape: PotholeOnSlope,
    start: Tensor,
    rho: Tensor,
    settings: PhaseSettings,
    progress: Progress,
    noise: Callable[[int], Tensor] | None = None,
) -> Tensor:
    """The first of `settings.steps` steps at which each row is outside the well; one more where it never is."""
    lr, steps = settings.eta, settings.steps
    points = iterate(method, landscape.loss, start, lr=lr, steps=steps, rho=rho, metric=landscape.metric, noise=noise)
    times = torch.full((len(start),), steps + 1)
    for step, x in enumerate(points, start=1):
        out = x.squeeze(-1).abs() > settings.r_eps
        times = torch.where(out, times.clamp(max=step), times)
        if step % 100 == 0:
            progress(step, steps)
            if bool((times <= step).all()):
                break
    progress(steps, steps)
    return times

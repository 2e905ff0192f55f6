"""Convergence transfer: with a bounded, changing metric and decaying schedules, the mean of `g.U g` falls like T^-1/2.

The problem is smooth and non-convex: robust regression with the Cauchy loss `log(1 + r^2)`. The eigenvalues of the
metric change from step to step inside `[1/4, 4]`. Step size and radius decay as `(t + 1)^-1/2` and
`(t + 1)^-power`: `power = 1/2` is the schedule of Euclidean SAM's analysis, `1/4` a slower decay of the radius (at the
cost of a factor `log T` in the bound).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

import llqr
from llqr.lab.pictures import styled
from llqr.lab.toy.drawing import COLOURS, GREEN, PURPLE, panels
from llqr.lab.toy.experiment import ToyResult
from llqr.theory.arguments import Array


@dataclass(frozen=True)
class RobustRegression:
    """`L(theta) = mean_n phi(x_n . theta - y_n)` with `phi(r) = log(1 + r^2)`, and 20% of the targets outliers."""

    inputs: Tensor
    targets: Tensor

    @staticmethod
    def random(samples: int = 512, dim: int = 20) -> "RobustRegression":
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(samples, dim, generator=generator, dtype=torch.float64)
        truth = torch.randn(dim, generator=generator, dtype=torch.float64) / dim**0.5
        outlier = torch.rand(samples, generator=generator, dtype=torch.float64) < 0.2
        noise = torch.randn(samples, generator=generator, dtype=torch.float64)
        return RobustRegression(inputs, inputs @ truth + torch.where(outlier, 4.0, 0.1) * noise)

    def loss(self, theta: Tensor, samples: Tensor | None = None) -> Tensor:
        chosen = slice(None) if samples is None else samples
        residual = self.inputs[chosen] @ theta - self.targets[chosen]
        return torch.log1p(residual**2).mean()


class OscillatingMetric:
    """`U_t = Q diag(u_t) Q^T`: every eigenvalue oscillates in `[1/4, 4]` at its own frequency."""

    def __init__(self, dim: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.Q: Tensor = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))[0]
        self._phase = torch.rand(dim, generator=generator, dtype=torch.float64) * 2 * torch.pi
        self._frequency = 0.002 + 0.02 * torch.rand(dim, generator=generator, dtype=torch.float64)
        self.step = 0

    @property
    def eigenvalues(self) -> Tensor:
        wave = 0.5 + 0.5 * torch.sin(self._phase + self._frequency * self.step)
        return torch.exp(log(16) * wave - log(4))

    def apply(self, gradient: Tensor) -> Tensor:
        """`U_t g`."""
        return self.Q @ (self.eigenvalues * (self.Q.T @ gradient))


@dataclass(frozen=True)
class Transfer:
    """`g_t . U_t g_t` of the full gradient at every step, and the slope of its running mean."""

    stationarity: Array

    @property
    def running_mean(self) -> Array:
        return np.asarray(np.cumsum(self.stationarity) / np.arange(1, len(self.stationarity) + 1))

    def slope(self, skip: float = 0.02) -> float:
        """Slope of log(running mean) against log T over the run, without the first fraction `skip`."""
        T = np.unique(np.geomspace(max(2, skip * len(self.stationarity)), len(self.stationarity), 60).astype(int))
        return float(np.polyfit(np.log(T), np.log(self.running_mean[T - 1]), 1)[0])


def transfer(*, steps: int = 4000, rho: float = 0.2, power: float = 0.5, batch: int | None = None) -> Transfer:
    """Run `llqr.LLQRSAM` under the changing metric; `batch=None` uses the full gradient, a number draws minibatches."""
    problem = RobustRegression.random()
    dim = problem.inputs.shape[1]
    generator = torch.Generator().manual_seed(1)
    theta = torch.nn.Parameter(2 * torch.randn(dim, generator=generator, dtype=torch.float64) / dim**0.5)
    metric = OscillatingMetric(dim)
    base = torch.optim.SGD([theta], lr=1.0)
    optimizer = llqr.LLQRSAM(
        base, llqr.FixedGeometry([(theta, metric.apply)]), rho=lambda step: rho * (step + 1) ** -power, norm="metric"
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(base, lambda step: (step + 1) ** -0.5)
    stationarity = np.empty(steps)
    for step in range(steps):
        metric.step = step
        gradient = torch.func.grad(problem.loss)(theta.detach())
        stationarity[step] = float(gradient @ metric.apply(gradient))
        samples = None if batch is None else torch.randint(len(problem.targets), (batch,), generator=generator)

        def closure(samples: Tensor | None = samples) -> Tensor:
            theta.grad = None
            loss = problem.loss(theta, samples)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()

        optimizer.step(closure)
        schedule.step()
    return Transfer(stationarity)


def run_transfer(steps: int = 4000, batch: int = 32) -> ToyResult:
    """Convergence transfer: the running mean of g.Ug under a bounded, changing metric."""
    runs = {}
    for power, shown in ((0.5, "1/2"), (0.25, "1/4")):
        for size, kind in ((None, "full gradient"), (batch, f"batches of {batch}")):
            runs[f"{kind}, radius power {shown}"] = transfer(steps=steps, power=power, batch=size)
    slopes = {name: run.slope() for name, run in runs.items()}
    every = np.unique(np.geomspace(1, steps, 60).astype(int))
    means = {name: run.running_mean[every - 1] for name, run in runs.items()}
    numbers = {"steps": steps, "slopes": slopes, "T": every, "running_mean": means}
    return ToyResult(numbers, {"transfer": transfer_figure(runs)})


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

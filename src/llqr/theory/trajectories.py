"""Trajectories of the library's own optimizers on toy losses: many independent points in one parameter.

Every row of a parameter `(rows, dim)` is an independent trajectory: the loss is summed over rows, so that gradients do
not mix, and the probe is normalised row by row. SAM and LLQR are not reimplemented here: `llqr.Optimizer` takes the
steps, over `torch.optim.SGD`, with the metric `U` given as a `llqr.FixedGeometry`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

import llqr

Method = Literal["sgd", "llqr", "sam", "llqr+sam"]
METHODS: tuple[Method, ...] = get_args(Method)

Loss = Callable[[Tensor], Tensor]
"""Points `(rows, dim)` to losses `(rows,)`."""
MetricMap = Callable[[Tensor], Tensor]
"""A gradient `(rows, dim)` to `U g`."""


def iterate(
    method: Method,
    loss: Loss,
    start: Tensor,
    *,
    lr: float,
    steps: int,
    rho: float | Tensor | None = None,
    metric: MetricMap | None = None,
    noise: Callable[[int], Tensor] | None = None,
) -> Iterator[Tensor]:
    """Yield the points `(rows, dim)` after each of `steps` steps of `method`.

    Args:
        method: `sgd`, `llqr` (transport by `U`), `sam` (Euclidean probe) or `llqr+sam` (probe and transport by `U`).
        start: points in float64 or float32, shape `(rows, dim)`.
        lr: the learning rate `eta`, one for all rows.
        rho: the probe radius of the SAM methods; a tensor `(rows,)` gives one radius per row.
        metric: `g -> U g`, needed by the LLQR methods.
        noise: step -> a perturbation, broadcastable to `(rows, dim)`, of the gradient that updates the weights. It is
            added *before* `U` transports that gradient, as minibatch noise would be, and never enters the probe.
    """
    if start.ndim != 2:
        raise ValueError(f"start must have the shape (rows, dim), got {tuple(start.shape)}.")
    parameter = torch.nn.Parameter(start.detach().clone())
    optimizer, passes = _optimizer(method, parameter, lr, rho, metric)
    for step in range(steps):
        yield _step(optimizer, parameter, loss, passes, None if noise is None else noise(step))


def _step(
    optimizer: llqr.Optimizer, parameter: torch.nn.Parameter, loss: Loss, passes: int, noise: Tensor | None
) -> Tensor:
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        parameter.grad = None
        total = loss(parameter).sum()
        if noise is not None and calls == passes:
            total = total + (noise * parameter).sum()
        total.backward()  # type: ignore[no-untyped-call]
        return total

    optimizer.step(closure)
    return parameter.detach().clone()


def _optimizer(
    method: Method, parameter: torch.nn.Parameter, lr: float, rho: float | Tensor | None, metric: MetricMap | None
) -> tuple[llqr.Optimizer, int]:
    """The optimizer and how many times one of its steps evaluates the loss."""
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}.")
    probe = geometry = None
    if "sam" in method:
        if rho is None or not bool((torch.as_tensor(rho) > 0).all()):
            raise ValueError(f"rho must be positive for {method}, got {rho!r}.")
        probe = llqr.SAMProbe(1.0 if isinstance(rho, Tensor) else rho, norm=_row_norm(rho))
    if "llqr" in method:
        if metric is None:
            raise ValueError(f"metric must be given for {method}.")
        geometry = llqr.FixedGeometry([(parameter, metric)])
    return llqr.Optimizer(torch.optim.SGD([parameter], lr=lr), probe, geometry), 1 if probe is None else 2


def _row_norm(rho: float | Tensor) -> Callable[[list[Tensor], list[Tensor]], list[Tensor]]:
    """`sqrt(v . U v)` of each row, so that rows stay independent, divided by `rho` if it has one value per row."""

    def norm(v: list[Tensor], d: list[Tensor]) -> list[Tensor]:
        squares = [(a * b).sum(-1, keepdim=True) for a, b in zip(v, d, strict=True)]
        # The smallest normal number avoids dividing zero by zero in a row that sits exactly on a minimum.
        divisors = [(square + torch.finfo(square.dtype).tiny).sqrt() for square in squares]
        if isinstance(rho, Tensor):
            divisors = [divisor / rho.unsqueeze(-1) for divisor in divisors]
        return divisors

    return norm


@dataclass(frozen=True)
class Trajectory:
    """All points of a run, `positions` of shape `(steps + 1, rows, dim)`, the start first."""

    positions: Tensor

    def losses(self, loss: Loss) -> Tensor:
        """The loss at every point, `(steps + 1, rows)`."""
        return torch.stack([loss(points) for points in self.positions])

    def first(self, inside: Callable[[Tensor], Tensor]) -> Tensor:
        """Per row, the first step (0 is the start) whose point satisfies `inside`; -1 where none does."""
        hits = torch.stack([inside(points) for points in self.positions])
        return torch.where(hits.any(0), hits.to(torch.int64).argmax(0), -1)

    def path_length(self, until: Tensor | None = None) -> Tensor:
        """Per row, the length of the path to step `until` (to the end where `until` is -1 or None)."""
        lengths = (self.positions[1:] - self.positions[:-1]).norm(dim=-1).cumsum(0)
        lengths = torch.cat([torch.zeros_like(lengths[:1]), lengths])
        if until is None:
            return lengths[-1]
        stop = torch.where(until < 0, len(lengths) - 1, until)
        return lengths.gather(0, stop.unsqueeze(0)).squeeze(0)


def simulate(
    method: Method,
    loss: Loss,
    start: Tensor,
    *,
    lr: float,
    steps: int,
    rho: float | Tensor | None = None,
    metric: MetricMap | None = None,
    noise: Callable[[int], Tensor] | None = None,
) -> Trajectory:
    """`iterate`, with every point kept."""
    points = iterate(method, loss, start, lr=lr, steps=steps, rho=rho, metric=metric, noise=noise)
    return Trajectory(torch.stack([start.detach(), *points]))

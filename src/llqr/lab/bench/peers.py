"""`llqr bench peers`: our SAM and F-SAM and pytorch_optimizer's, with the same network, batch and base optimizer.

A step is two forward and backward passes and everything the optimizer does; a ratio below 1 means that ours is faster.
Theirs runs with its defaults ("default": `foreach` on a GPU, not on a CPU) and with `foreach` turned on.

The passes are the same work on both sides and take nearly all of the time. What the optimizers themselves add is
measured separately ("alone"), by steps whose passes only put ready-made gradients in place. Ours then does more: it
keeps the second pass from changing BatchNorm statistics and dropout masks, which theirs leaves to the user.

The row "control" compares two copies of theirs: its distance from 1 is the noise of the machine.
"""

from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

import llqr
from llqr.lab.bench.timing import BURST, Action, interleaved, quartiles, ratio
from llqr.lab.bench.workload import Setup, Workload
from llqr.lab.errors import ConfigurationError
from llqr.lab.number_table import Column, number_table

SETTINGS: dict[str, Any] = {"lr": 1e-4, "momentum": 0.9, "weight_decay": 5e-4}
RHO, LAM = 0.05, 0.9
ROWS = (("SAM", "control"), ("SAM", "default"), ("SAM", "foreach"), ("F-SAM", "default"), ("F-SAM", "foreach"))


def peer() -> ModuleType:
    try:
        import pytorch_optimizer
    except ImportError as error:
        raise ConfigurationError(
            "peers: pytorch_optimizer cannot be imported; install pytorch-optimizer==4.1.0 or put it on PYTHONPATH."
        ) from error
    return pytorch_optimizer


def measure(setup: Setup, repeats: int) -> Iterator[dict[str, Any]]:
    """Whole steps, and the optimizers alone."""
    for network in setup.networks:
        for method, variant in ROWS:
            mine, other = setup.workload(network), setup.workload(network)
            foreach, control = variant == "foreach", variant == "control"
            first = theirs(method, False, mine.model) if control else ours(method, foreach, mine)
            second = theirs(method, foreach, other.model)
            for what in ("step", "alone"):
                actions = {
                    "ours": Action(step_of(first, pass_of(mine, first, what), primed=control), repeats, BURST),
                    "theirs": Action(step_of(second, pass_of(other, second, what), primed=True), repeats, BURST),
                }
                seconds = interleaved(actions, mine.clock)
                row: dict[str, Any] = {"model": network.label, "method": method, "theirs": variant, "what": what}
                row |= {"our_seconds": quartiles(seconds["ours"]), "their_seconds": quartiles(seconds["theirs"])}
                yield row | {"ratio": ratio(seconds["ours"], seconds["theirs"])}


def ours(method: str, foreach: bool, workload: Workload) -> torch.optim.Optimizer:
    # Their SAM hands `foreach` on to its base optimizer, their F-SAM does not; the bases must be the same.
    parameters = workload.model.parameters()
    base = torch.optim.SGD(parameters, foreach=True if foreach and method == "SAM" else None, **SETTINGS)
    if method == "SAM":
        return llqr.SAM(base, rho=RHO, model=workload.model)
    return llqr.FriendlySAM(base, rho=RHO, lam=LAM, model=workload.model)


def theirs(method: str, foreach: bool, model: nn.Module) -> torch.optim.Optimizer:
    settings = {"rho": RHO, "foreach": True if foreach else None, **SETTINGS}
    kind, own = (peer().SAM, {}) if method == "SAM" else (peer().FriendlySAM, {"lmbda": LAM})
    made: torch.optim.Optimizer = kind(model.parameters(), torch.optim.SGD, **own, **settings)
    return made


def pass_of(workload: Workload, optimizer: torch.optim.Optimizer, what: str) -> Callable[[], Tensor]:
    """A closure; for "alone" one with fresh gradient tensors, as a backward pass makes them, and no other work."""
    if what == "step":
        return workload.closure

    def ready_gradients() -> Tensor:
        optimizer.zero_grad()
        for parameter in workload.model.parameters():
            parameter.grad = parameter.detach().clone()
        return torch.zeros((), device=workload.precision.device)

    return ready_gradients


def step_of(optimizer: torch.optim.Optimizer, closure: Callable[[], Any], *, primed: bool) -> Callable[[], None]:
    """Theirs expects the centre's gradients to be there when `step` is called; ours computes them itself."""

    def step() -> None:
        if primed:
            closure()
        optimizer.step(closure)

    return step


def as_table(rows: Sequence[dict[str, Any]]) -> Table:
    numbers = [
        Column("ours ms", "our_seconds.median", "{:.2f}", 1e3),
        Column("theirs ms", "their_seconds.median", "{:.2f}", 1e3),
        Column("ratio", "ratio.median", "{:.3f}x"),
        Column("quartiles", "ratio", "{:.3f}"),
    ]
    return number_table("peers", rows, ("model", "method", "theirs", "what"), numbers)

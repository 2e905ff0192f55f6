"""`llqr bench host`: what a step and a refresh of a small network cost on one CPU core, as ratios.

The network is so small that Python and the launch of operations weigh as much as arithmetic. Times are CPU times of one
thread, which the load of other processes hardly changes. A row divides the time of ``what`` by that of ``relative_to``:

- a SAM step by pytorch_optimizer's, and an LLQR+SAM step without a refresh by a SAM step;
- a refresh of 50 inner steps by 51 bare products `J^T Q J v` of `torch.func`: `jvp`, the Hessian of cross-entropy
  written out, then `vjp`;
- "arithmetic": only the matrix products of `U` in such a step (`U g`, twice) or refresh (`U g` and its pull-back, in
  every inner step), without which there is no metric. No program around them can bring the ratio below theirs (for a
  step, below 1 more).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

import llqr
from llqr.lab.bench import peers
from llqr.lab.bench.refresh import RefreshSettings, geometry_of, learn
from llqr.lab.bench.timing import BURST, Action, Clock, interleaved, quartiles, ratio
from llqr.lab.bench.workload import Network, Setup, Workload
from llqr.lab.number_table import Column, number_table

NETWORK = Network("mlp", {"hidden": [128, 128], "image_size": 8, "channels": 1, "classes": 10})
STRUCTURES, ENGINES, INTERVALS = ("e-kfac", "kfac", "diagonal"), ("forward", "double-backward"), (1, 3)
STEPS = llqr.Inner().steps
Key = tuple[str, str, str, str]
"""What is timed, with which structure, engine and `product_every`."""
Named = dict[str, Tensor]
PEER, SAM, PRODUCTS = (("pytorch_optimizer's SAM", "", "", ""), ("SAM", "", "", ""), ("51 products", "", "", ""))


def measure(setup: Setup, repeats: int) -> Iterator[dict[str, Any]]:
    clock = Clock(setup.precision.device, time.process_time)
    for network in setup.networks:
        steps, refreshes = _steps(setup, network), _refreshes(setup, network)
        for actions, base in ((steps, SAM), (refreshes, PRODUCTS)):
            burst = BURST if base is SAM else 0.0
            timed = interleaved({str(key): Action(run, repeats, burst) for key, run in actions.items()}, clock)
            for key in actions:
                other = PEER if key == SAM else base
                if key in (PEER, PRODUCTS):
                    continue
                what = dict(zip(("what", "structure", "engine", "product_every"), key, strict=True))
                mine, theirs = timed[str(key)], timed[str(other)]
                numbers = {"seconds": quartiles(mine), "other_seconds": quartiles(theirs), "ratio": ratio(mine, theirs)}
                yield {"model": network.label, **what, "relative_to": other[0], **numbers}


def _steps(setup: Setup, network: Network) -> dict[Key, Callable[[], object]]:
    found: dict[Key, Callable[[], object]] = {}
    work = setup.workload(network)
    optimizer = peers.theirs("SAM", False, work.model)
    found[PEER] = peers.step_of(optimizer, work.closure, primed=True)
    for structure in ("", *STRUCTURES):
        work = setup.workload(network)
        geometry = learn(geometry_of(work, RefreshSettings(structure)), work) if structure else None
        base = torch.optim.SGD(work.model.parameters(), **peers.SETTINGS)
        sam = llqr.SAM(base, rho=peers.RHO, geometry=geometry, model=work.model)
        found["LLQR+SAM" if geometry else "SAM", structure, "", ""] = peers.step_of(sam, work.closure, primed=False)
        if geometry is not None:
            found["arithmetic", structure, "", ""] = _arithmetic(geometry, work, applied=2, pulled=0)
    return found


def _refreshes(setup: Setup, network: Network) -> dict[Key, Callable[[], object]]:
    work = setup.workload(network)
    found = {PRODUCTS: _products(work)}
    for structure in STRUCTURES:
        work = setup.workload(network)
        for engine in ENGINES:
            for every in INTERVALS:
                inner, runtime = llqr.Inner(steps=STEPS, product_every=every), llqr.Runtime(engine=engine)
                geometry = geometry_of(work, RefreshSettings(structure, runtime=runtime, inner=inner))
                found["refresh", structure, engine, str(every)] = partial(geometry.refresh, work.batch)
        found["arithmetic", structure, "", ""] = _arithmetic(learn(geometry, work), work, applied=0, pulled=STEPS)
    return found


def _products(work: Workload) -> Callable[[], object]:
    """One for every inner step, and one that reads the objective."""
    theta = {name: parameter.detach() for name, parameter in work.model.named_parameters()}

    def run() -> None:
        product = bare_product(work, theta)
        for _ in range(STEPS + 1):
            product(theta)

    return run


def bare_product(work: Workload, theta: Named) -> Callable[[Named], Named]:
    """`v -> H v` of natural gradient and cross-entropy, at these weights."""

    def outputs(weights: Named) -> Tensor:
        found: Tensor = torch.func.functional_call(work.model, weights, work.batch[0])
        return found

    p = outputs(theta).softmax(-1)

    def product(v: Named) -> Named:
        pJv = p * torch.func.jvp(outputs, (theta,), (v,))[1]
        pull: Any = torch.func.vjp(outputs, theta)[1]  # torch's annotation has auxiliary outputs, too
        found: Named = pull(pJv - p * pJv.sum(-1, keepdim=True))[0]
        return found

    return product


def _arithmetic(geometry: llqr.Geometry, work: Workload, applied: int, pulled: int) -> Callable[[], object]:
    metric = geometry.metric
    g = metric.pack({name: parameter.detach() for name, parameter in work.model.named_parameters()})
    parts = list(zip(metric.groups, metric.factors(), g, strict=True))

    @torch.no_grad()
    def run() -> None:
        for group, factors, part in parts:
            for _ in range(applied):
                group.apply(factors, part)
            for _ in range(pulled):
                group.trace(factors, part)[1](part)

    return run


def as_table(rows: Sequence[dict[str, Any]]) -> Table:
    numbers = [
        Column("ms", "seconds.median", "{:.2f}", 1e3),
        Column("relative to ms", "other_seconds.median", "{:.2f}", 1e3),
        Column("ratio", "ratio.median", "{:.2f}x"),
        Column("quartiles", "ratio", "{:.2f}"),
    ]
    return number_table("host", rows, ("what", "structure", "engine", "product_every", "relative_to"), numbers)

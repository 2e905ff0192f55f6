"""Steps of the methods that are compared, all of them on one network: their times do not depend on its weights."""

from collections.abc import Callable

import torch

import llqr
from llqr.lab.bench.workload import Workload
from llqr.lab.config.settings import Base

# Small, so that the weights stay finite however many steps are timed.
SGD = Base("sgd", lr=1e-4, weight_decay=5e-4, momentum=0.9)
ADAMW = Base("adamw", lr=1e-5, weight_decay=5e-4)

PLAIN = {"SGD": SGD, "AdamW": ADAMW}
WRAPPED = {"SAM": "sam", "F-SAM": "fsam", "LLQR": "llqr", "LLQR+SAM": "llqr+sam"}
METHODS = (*PLAIN, *WRAPPED)
"""As the paper's tables call them."""


def learns_metric(method: str) -> bool:
    return method.startswith("LLQR")


def optimizer_for(method: str, workload: Workload, geometry: llqr.Geometry | None) -> torch.optim.Optimizer:
    """SGD and AdamW as torch has them, the others with SGD as base."""
    if method in PLAIN:
        return PLAIN[method].build(workload.model)
    base = SGD.build(workload.model)
    return llqr.build(WRAPPED[method], base, geometry=geometry if learns_metric(method) else None, model=workload.model)


def step_of(method: str, workload: Workload, geometry: llqr.Geometry | None) -> Callable[[], object]:
    """One step on the workload's batch; a refresh, should one be due, learns from the same batch."""
    optimizer = optimizer_for(method, workload, geometry)
    closure = workload.closure(optimizer)
    if method in PLAIN:

        def step() -> None:
            closure()
            optimizer.step()

        return step
    return lambda: optimizer.step(closure, batch=workload.batch)

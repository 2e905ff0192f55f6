"""Steps of the methods that are compared, all of them on one network: their times do not depend on its weights."""

from collections.abc import Callable

import llqr
from llqr.lab.bench.workload import Workload
from llqr.lab.config.settings import Base

# Small, so that the weights stay finite however many steps are timed.
SGD = Base("sgd", lr=1e-4, weight_decay=5e-4, momentum=0.9)
ADAMW = Base("adamw", lr=1e-5, weight_decay=5e-4)

UNWRAPPED = {"SGD": SGD, "AdamW": ADAMW}
METHODS = (*UNWRAPPED, "SAM", "F-SAM", "LLQR", "LLQR+SAM")
"""As the paper's tables call them."""


def learns_metric(method: str) -> bool:
    return method.startswith("LLQR")


def step_of(method: str, workload: Workload, geometry: llqr.Geometry | None) -> Callable[[], object]:
    """One step on the workload's batch; a refresh, should one be due, learns from the same batch."""
    if method in UNWRAPPED:
        plain = UNWRAPPED[method].build(workload.model)
        run_pass = workload.closure(plain)
        return lambda: (run_pass(), plain.step())
    make = {"LLQR": llqr.Optimizer, "F-SAM": llqr.FriendlySAM}.get(method, llqr.SAM)
    own = geometry if learns_metric(method) else None
    optimizer = make(SGD.build(workload.model), geometry=own, model=workload.model)
    closure = workload.closure(optimizer)
    return lambda: optimizer.step(closure, batch=workload.batch)

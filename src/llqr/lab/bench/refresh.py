"""`llqr bench refresh`: the time of a refresh by engine and structure, its parts, and how exact its result is.

The numerical error of reduced precision or approximate products is measured against an exact refresh at the same
weights on the same batch.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from rich.table import Table
from torch import Tensor

import llqr
from llqr.lab.bench.measured_refresh import MeasuredRefresh, RefreshSettings
from llqr.lab.bench.timing import BURST, Action, interleaved, quartiles
from llqr.lab.bench.workload import Passes, Setup, Workload, step_of
from llqr.lab.number_table import Column, number_table
from llqr.lab.passes import Precision

Vector = Mapping[str, Tensor]
"""One tensor per parameter."""
STEPS_PER_REFRESH = 2
"""How many SGD steps are timed per refresh; a step takes a small part of the time."""


@dataclass(frozen=True)
class ExactRefresh:
    """What an exact refresh gives: forward mode with unfused attention, no autocast and no TF32.

    Attributes:
        gradient: `g`.
        directions: the `v` of the products: `g`, along which a refresh begins, and a random one.
        products: `H v` for each of them.
        Ug: `U g` after one refresh from the identity; None if that refresh was rejected.
        reason: why it was rejected.
    """

    gradient: Vector
    directions: Mapping[str, Vector]
    products: Mapping[str, Vector]
    Ug: Vector | None
    reason: str

    @classmethod
    def of(cls, workload: Workload, settings: RefreshSettings, dtype: torch.dtype) -> Self:
        """At the current weights of the workload, which do not change."""
        with exact_arithmetic(workload, dtype) as alone:
            refresh = MeasuredRefresh(alone, settings.exact())
            with refresh.quadratic_model() as model:
                gradient = model.gradient
                generator = torch.Generator(alone.precision.device).manual_seed(1)
                drawn = {
                    name: torch.randn(part.shape, generator=generator, dtype=dtype, device=part.device)
                    for name, part in gradient.items()
                }
                directions = {"= g": gradient, "random": drawn}
                products = {name: model.product(v) for name, v in directions.items()}
            report = refresh.run()
            Ug = refresh.geometry.metric.apply(gradient) if report.accepted else None
        return cls(gradient, directions, products, Ug, report.reason)

    def errors(self, refresh: MeasuredRefresh, accepted: bool) -> dict[str, float | None]:
        """Relative errors of `H v` and of the learned change `U g - g`, after one refresh."""
        found: dict[str, float | None] = {}
        with refresh.quadratic_model() as model:
            for name, v in self.directions.items():
                given = {key: part.to(model.gradient[key].dtype) for key, part in v.items()}
                found[f"Hv, v {name}"] = distance(model.product(given), self.products[name]) / size(self.products[name])
        found["Ug"] = None
        if accepted and self.Ug is not None:
            Ug = refresh.geometry.metric.apply({name: part.float() for name, part in self.gradient.items()})
            found["Ug"] = distance(Ug, self.Ug) / distance(self.Ug, self.gradient)
        return found


@contextmanager
def exact_arithmetic(workload: Workload, dtype: torch.dtype) -> Iterator[Workload]:
    """The workload without autocast and TF32; in float64 on a copy of its network."""
    alone = copy.copy(workload)
    alone.precision = Precision("fp32", workload.precision.device)
    if dtype == torch.float64:
        images, labels = workload.batch
        alone.model, alone.batch = copy.deepcopy(workload.model).double(), (images.double(), labels)
    alone.precision.set_up()
    try:
        yield alone
    finally:
        workload.precision.set_up()


def size(a: Vector) -> float:
    return float(torch.stack([part.double().square().sum() for part in a.values()]).sum().sqrt())


def distance(a: Vector, b: Vector) -> float:
    return size({name: a[name].double() - part.double() for name, part in b.items()})


def measure(
    setup: Setup, ways: Sequence[RefreshSettings], passes: Passes, repeats: int, reference: torch.dtype | None
) -> Iterator[dict[str, Any]]:
    """A row for every network and way to learn a metric, with an error message for one that is refused.

    With ``reference``, also the errors against exact refreshes in that precision.
    """
    for network in setup.networks:
        exact: dict[RefreshSettings, ExactRefresh] = {}
        for settings in ways:
            alike = settings.exact()
            if reference is not None and alike not in exact:
                exact = {alike: ExactRefresh.of(setup.workload(network), alike, reference)}
            yield _row(setup.workload(network, passes), settings, repeats, exact.get(alike))


def _row(workload: Workload, settings: RefreshSettings, repeats: int, exact: ExactRefresh | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "model": workload.network.label,
        "parameters": workload.parameters,
        "structure": settings.structure,
        "engine": settings.runtime.engine,
        "product_every": settings.inner.product_every,
    }
    try:
        refresh = MeasuredRefresh(workload, settings)
        reports: list[llqr.Refresh] = []
        row["first_seconds"] = workload.clock.seconds(lambda: reports.append(refresh.run()))
    except ValueError as error:
        return row | {"refused": str(error)}
    (report,) = reports
    row |= {"engine": report.engine, "accepted": report.accepted, "reason": report.reason}
    if exact is not None:  # before a step moves the weights
        row |= {"errors": exact.errors(refresh, report.accepted), "reference_reason": exact.reason}
    actions = {
        "refresh": Action(refresh.run, repeats, warm_up=1),
        "SGD": Action(step_of("SGD", workload), STEPS_PER_REFRESH * repeats, BURST),
    }
    measured = interleaved(actions, workload.clock)
    spent, step = quartiles(measured["refresh"]), quartiles(measured["SGD"])
    products = settings.products
    return row | {
        "products": products,
        "seconds": spent,
        "seconds_a_product": spent["median"] / products,
        "sgd_step_seconds": step,
        "sgd_steps_a_product": spent["median"] / products / step["median"],
    }


def as_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The time per product is that of the whole refresh over its products."""
    numbers = [
        Column("product every", "product_every", "{:d}"),  # older files lack it; see their command
        Column("s", "seconds.median", "{:.3f}"),
        Column("quartiles", "seconds", "{:.3f}"),
        Column("first s", "first_seconds", "{:.2f}"),
        Column("ms/Hv", "seconds_a_product", "{:.2f}", 1e3),
        Column("SGD steps/Hv", "sgd_steps_a_product", "{:.2f}"),
        Column("error Hg", "errors.Hv, v = g", "{:.1e}"),
        Column("error Hv", "errors.Hv, v random", "{:.1e}"),
        Column("error Ug", "errors.Ug", "{:.1e}"),
    ]
    return number_table("refresh", rows, ("model", "structure", "engine"), numbers)

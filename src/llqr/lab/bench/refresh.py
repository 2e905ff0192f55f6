"""`llqr bench refresh`: the time of a refresh by engine and structure, and how exact what it learns is.

The error of reduced precision or approximate products is measured against an exact refresh at the same weights on the
same batch: forward mode with unfused attention, a product in every inner step, no autocast and no TF32.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from rich.table import Table
from torch import Tensor

import llqr
from llqr.lab.bench.timing import BURST, Action, interleaved, quartiles
from llqr.lab.bench.workload import Network, PassOptions, Setup, Workload, cross_entropy, step_of
from llqr.lab.models.transformer import differentiable_forward
from llqr.lab.number_table import Column, number_table
from llqr.lab.passes import Precision

Vector = Mapping[str, Tensor]
"""One tensor per parameter."""
NEVER = 10**9
STEPS_PER_REFRESH = 2
"""How many SGD steps are timed per refresh; a step takes a small part of the time."""


@dataclass(frozen=True)
class RefreshSettings:
    """How a metric is learned.

    Attributes:
        structure: structure of U.
        attention: in a refresh: fused, as the network has it, or unfused: matrix products and a softmax, which have
            every derivative.
        runtime, inner: as in `llqr.Geometry`.
    """

    structure: str = "e-kfac"
    attention: Literal["fused", "unfused"] = "fused"
    runtime: llqr.Runtime = field(default_factory=llqr.Runtime)
    inner: llqr.Inner = field(default_factory=llqr.Inner)

    def exact(self) -> "RefreshSettings":
        """The same refresh by exact products, one in every inner step, eager and in full precision."""
        own = self.runtime
        runtime = llqr.Runtime(engine="forward", micro_batch=own.micro_batch, max_side=own.max_side)
        return replace(self, attention="unfused", inner=replace(self.inner, product_every=1), runtime=runtime)


def geometry_of(workload: Workload, settings: RefreshSettings) -> llqr.Geometry:
    """A geometry of the workload's network, in its precision, that is never due.

    It does not average: what one refresh learned is compared as it is, not blended with the identity. However many
    refreshes on random images are rejected, there is no error.
    """
    autocast = torch.bfloat16 if workload.precision.name == "bf16" else None
    return llqr.Geometry(
        workload.model,
        cross_entropy,
        structure=settings.structure,
        every=NEVER,
        ema=0.0,
        inner=settings.inner,
        runtime=replace(settings.runtime, autocast=autocast, max_failures=NEVER),
        forward=differentiable_forward if settings.attention == "unfused" else None,
    )


def learn(geometry: llqr.Geometry, workload: Workload) -> llqr.Geometry:
    """Refresh once, so that `U` acts in steps."""
    geometry.refresh(workload.batch)
    if not geometry.metric.learned:  # the refresh was rejected
        geometry.metric.assign(geometry.metric.factors())
    return geometry


def exact_effect(
    setup: Setup, network: Network, settings: RefreshSettings, dtype: torch.dtype
) -> tuple[Vector, Vector] | None:
    """`g` and `U g` after one exact refresh from the identity in this precision; None if that refresh is rejected."""
    workload = replace(setup, precision=Precision("fp32", setup.precision.device)).workload(network)
    workload.model.to(dtype)
    images, labels = workload.batch
    batch = images.to(dtype), labels
    geometry = geometry_of(workload, settings.exact())
    with geometry.quadratic_model(batch) as model:
        gradient = model.gradient
    accepted = geometry.refresh(batch).accepted
    return (gradient, geometry.metric.apply(gradient)) if accepted else None


def relative_error(metric: llqr.Metric, gradient: Vector, exact: Vector) -> float:
    """`|Ug - U'g| / |U'g - g|`: the error of what was learned, relative to how much was learned."""
    found = metric.apply({name: part.float() for name, part in gradient.items()})
    return distance(found, exact) / distance(exact, gradient)


def distance(a: Vector, b: Vector) -> float:
    return float(sum((a[name].double() - part.double()).square().sum() for name, part in b.items()) ** 0.5)


def measure(
    setup: Setup, ways: Sequence[RefreshSettings], passes: PassOptions, repeats: int, reference: torch.dtype | None
) -> Iterator[dict[str, Any]]:
    """A row for every network and way to learn a metric, with an error message for one that is refused.

    With ``reference``, also the error against an exact refresh in that precision.
    """
    for network in setup.networks:
        exact: dict[RefreshSettings, tuple[Vector, Vector] | None] = {}
        for settings in ways:
            alike = settings.exact()
            if reference is not None and alike not in exact:
                exact = {alike: exact_effect(setup, network, alike, reference)}
            yield _row(setup.workload(network, passes), settings, repeats, exact.get(alike))


def _row(
    workload: Workload, settings: RefreshSettings, repeats: int, exact: tuple[Vector, Vector] | None
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "model": workload.network.label,
        "parameters": workload.parameters,
        "structure": settings.structure,
        "engine": settings.runtime.engine,
        "product_every": settings.inner.product_every,
    }
    reports: list[llqr.Refresh] = []
    try:
        geometry = geometry_of(workload, settings)
        row["first_seconds"] = workload.clock.seconds(lambda: reports.append(geometry.refresh(workload.batch)))
    except (ValueError, RuntimeError) as error:  # the engine cannot differentiate the network
        return row | {"refused": str(error).splitlines()[0]}
    row |= {"engine": reports[0].engine, "accepted": reports[0].accepted, "reason": reports[0].reason}
    if exact is not None and reports[0].accepted:  # before a step moves the weights
        row["errors"] = {"Ug": relative_error(geometry.metric, *exact)}
    actions = {
        "refresh": Action(lambda: geometry.refresh(workload.batch), repeats, warm_up=1),
        "SGD": Action(step_of("SGD", workload), STEPS_PER_REFRESH * repeats, BURST),
    }
    measured = interleaved(actions, workload.clock)
    spent, step = quartiles(measured["refresh"]), quartiles(measured["SGD"])
    # Without the last one, which only reads the objective.
    products = sum(inner != "extrapolate" for inner in settings.inner.plan()[:-1])
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
        Column("product every", "product_every", "{:d}"),
        Column("s", "seconds.median", "{:.3f}"),
        Column("quartiles", "seconds", "{:.3f}"),
        Column("first s", "first_seconds", "{:.2f}"),
        Column("ms/Hv", "seconds_a_product", "{:.2f}", 1e3),
        Column("SGD steps/Hv", "sgd_steps_a_product", "{:.2f}"),
        Column("error Ug", "errors.Ug", "{:.1e}"),
    ]
    return number_table("refresh", rows, ("model", "structure", "engine"), numbers)

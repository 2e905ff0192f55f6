"""The numerical error of a refresh in reduced precision or by approximate products.

It is measured against an exact refresh at the same weights on the same batch.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from llqr.lab.bench.measured_refresh import MeasuredRefresh, RefreshSettings
from llqr.lab.bench.workload import Workload
from llqr.lab.passes.precision import Precision

Vector = Mapping[str, Tensor]
"""One tensor per parameter."""


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

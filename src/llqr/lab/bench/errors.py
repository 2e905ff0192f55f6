"""How far a reduced-precision or approximate refresh is from the exact one, at the same weights on the same batch."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from llqr.lab.bench.refreshing import MeasuredGeometry, Refreshing, geometry_for
from llqr.lab.bench.workload import Workload
from llqr.lab.training.precision import Precision

Named = Mapping[str, Tensor]
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Reference:
    """What the exact refresh gives: forward mode with unfused attention, no autocast and no TF32.

    Attributes:
        gradient: `g`.
        directions: the `v` of the products: `g`, along which a refresh begins, and a random one.
        products: `H v` for each of them.
        moved: `U g` after one refresh from the identity; None if that was thrown away, with the reason.
    """

    gradient: Named
    directions: Mapping[str, Named]
    products: Mapping[str, Named]
    moved: Named | None
    reason: str

    def errors(self, geometry: MeasuredGeometry, accepted: bool) -> dict[str, float | None]:
        """Relative errors of `H v` and of the learned change `U g - g`, after one refresh of the geometry."""
        found: dict[str, float | None] = {}
        with geometry.quadratic() as model:
            for name, v in self.directions.items():
                given = {key: part.to(model.gradient[key].dtype) for key, part in v.items()}
                found[f"Hv, v {name}"] = distance(model.product(given), self.products[name]) / size(self.products[name])
        found["Ug"] = None
        if accepted and self.moved is not None:
            moved = geometry.metric.apply({name: part.float() for name, part in self.gradient.items()})
            found["Ug"] = distance(moved, self.moved) / distance(self.moved, self.gradient)
        return found


def reference_for(workload: Workload, refreshing: Refreshing, dtype: torch.dtype) -> Reference:
    """Computed at the weights the workload has now, which stay as they are."""
    exact = replace(
        refreshing,
        engine="forward",
        attention="unfused",
        apply="fp32",
        capture=False,
        compile=False,
        product_every=1,
    )
    with exact_arithmetic(workload, dtype) as alone:
        geometry = geometry_for(alone, exact)
        with geometry.quadratic() as model:
            gradient = model.gradient
            generator = torch.Generator(alone.precision.device).manual_seed(1)
            drawn = {
                name: torch.randn(part.shape, generator=generator, dtype=dtype, device=part.device)
                for name, part in gradient.items()
            }
            directions = {"= g": gradient, "random": drawn}
            products = {name: model.product(v) for name, v in directions.items()}
        report = geometry.learn()
        moved = geometry.metric.apply(gradient) if report.accepted else None
    return Reference(gradient, directions, products, moved, report.reason)


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


def size(a: Named) -> float:
    return float(torch.stack([part.double().square().sum() for part in a.values()]).sum().sqrt())


def distance(a: Named, b: Named) -> float:
    return size({name: a[name].double() - part.double() for name, part in b.items()})

"""A refresh that is measured, and how the metric is learned in it."""

from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

import llqr
from llqr.curvature import QuadraticModel
from llqr.lab.bench.workload import Workload, cross_entropy
from llqr.lab.errors import ConfigurationError
from llqr.lab.models.sublayers import differentiable_forward
from llqr.lab.passes import Precision
from llqr.lab.runs.json_files import plain

NEVER = 10**9
ATTENTION = ("fused", "unfused")


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
    attention: str = "fused"
    runtime: llqr.Runtime = field(default_factory=llqr.Runtime)
    inner: llqr.Inner = field(default_factory=llqr.Inner)

    def __post_init__(self) -> None:
        if self.attention not in ATTENTION:
            raise ValueError(f"attention: unknown {self.attention!r}; choose one of {', '.join(ATTENTION)}")

    @property
    def products(self) -> int:
        """Products with `H` per refresh, without the last step's, which only reads the objective."""
        return sum(step != "extrapolate" for step in self.inner.plan()[:-1])

    def exact(self) -> "RefreshSettings":
        """The same refresh by exact products, one in every inner step, eager and in full precision."""
        inner, own = replace(self.inner, product_every=1), self.runtime
        runtime = llqr.Runtime(engine="forward", micro_batch=own.micro_batch, max_side=own.max_side)
        return replace(self, attention="unfused", inner=inner, runtime=runtime)

    def runtime_in(self, precision: Precision) -> llqr.Runtime:
        """With the autocast of the passes, and without an error if many refreshes on random images are rejected."""
        autocast = torch.bfloat16 if precision.name == "bf16" else None
        return replace(self.runtime, autocast=autocast, max_failures=NEVER)

    def to_dict(self, precision: Precision) -> dict[str, Any]:
        """What is measured in this precision, as JSON holds it."""
        found: dict[str, Any] = plain(asdict(replace(self, runtime=self.runtime_in(precision))))
        return found


class MeasuredRefresh:
    """A geometry of the workload's network, in its precision, that is refreshed on the workload's batch on request.

    It does not average: what one refresh learned is compared as it is, not blended with the identity.
    """

    def __init__(self, workload: Workload, settings: RefreshSettings) -> None:
        self._batch = workload.batch
        self.geometry = llqr.Geometry(
            workload.model,
            cross_entropy,
            structure=settings.structure,
            every=NEVER,
            ema=0.0,
            inner=settings.inner,
            runtime=settings.runtime_in(workload.precision),
            forward=differentiable_forward if settings.attention == "unfused" else None,
        )

    def run(self) -> llqr.Refresh:
        """One refresh; a configuration error if the engine cannot differentiate the network."""
        try:
            return self.geometry.refresh(self._batch)
        except RuntimeError as error:
            raise ConfigurationError(f"--engine {self.geometry.engine}: {str(error).splitlines()[0]}") from error

    def run_once_for_steps(self) -> None:
        """Refresh once, so that `U` acts in steps and no refresh is due."""
        self.run()
        metric = self.geometry.metric
        if not metric.learned:  # the refresh was rejected
            metric.assign(metric.factors())

    def quadratic_model(self) -> AbstractContextManager[QuadraticModel]:
        """What a refresh would learn from."""
        return self.geometry.quadratic_model(self._batch)

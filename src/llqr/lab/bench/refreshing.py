"""A geometry whose refresh is to be measured, and a look inside one."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import llqr
from llqr.curvature import QuadraticModel, frozen
from llqr.lab.bench.clock import Clock, Mark
from llqr.lab.bench.workload import Classification, Workload
from llqr.lab.config.strict import ConfigurationError
from llqr.lab.models.sublayers import differentiable_forward

NEVER = 10**9
APPLY = {"fp32": None, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Refreshing:
    """How a metric is learned; the fields are arguments of `llqr.Geometry`, but for:

    Attributes:
        attention: ``fused`` as the network has it, or ``unfused``: products and a softmax, which have every derivative.
        steps: of the inner loop.
        product_every: inner steps to a product with `H`.
        apply: what `U g` is computed in, ``fp32`` or ``bf16``.
    """

    structure: str = "e-kfac"
    engine: str = "auto"
    attention: str = "fused"
    steps: int = 50
    solver: str = "heavy-ball"
    apply: str = "fp32"
    micro_batch: int | None = None
    capture: bool = False
    compile: bool = False
    product_every: int = 1

    def __post_init__(self) -> None:
        for name, known in (("attention", ("fused", "unfused")), ("apply", APPLY)):
            if getattr(self, name) not in known:
                raise ConfigurationError(f"--{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}.")

    @property
    def products(self) -> int:
        """With `H`, before the one that reads the last objective."""
        return sum(map(llqr.Inner(steps=self.steps, product_every=self.product_every).multiplies, range(self.steps)))

    def arguments(self) -> dict[str, Any]:
        """Of `llqr.Geometry`."""
        return {
            "structure": self.structure,
            "engine": self.engine,
            "steps": self.steps,
            "product_every": self.product_every,
            "solver": self.solver,
            "apply_dtype": APPLY[self.apply],
            "micro_batch": self.micro_batch,
            "capture": self.capture,
            "compile": self.compile,
            "forward": differentiable_forward if self.attention == "unfused" else None,
        }


def geometry_for(workload: Workload, refreshing: Refreshing) -> "MeasuredGeometry":
    """A geometry of the workload's network, in its precision, that asks for one refresh and then for no other."""
    autocast = torch.bfloat16 if workload.precision.name == "bf16" else None
    settings = refreshing.arguments() | {"autocast": autocast}
    try:
        return MeasuredGeometry(workload, workload.model, Classification().loss, every=NEVER, **settings)
    except ValueError as error:  # names an argument, which is an option here
        raise ConfigurationError(f"--{error}") from error


class MeasuredGeometry(llqr.Geometry):
    """A geometry that says what the parts of its refresh take, and lends the quadratic model it learns from."""

    def __init__(self, workload: Workload, *arguments: Any, **settings: Any) -> None:
        # No average: what a refresh learns is looked at as it is, not rounded off beside the identity. And timings go
        # on whatever a refresh on random images comes to.
        super().__init__(*arguments, ema=0.0, max_failures=NEVER, **settings)
        self._batch = workload.batch
        self._clock = Clock(workload.precision.device)
        self._watch: Watch | None = None

    def learn(self) -> llqr.Refresh:
        """A refresh on the workload's batch; a sentence if the engine cannot differentiate the network."""
        try:
            return self.refresh(self._batch)
        except RuntimeError as error:
            raise ConfigurationError(f"--engine {self.engine}: {str(error).splitlines()[0]}") from error

    def pretend(self) -> None:
        """Let `U` act and no refresh be due: what a step costs does not depend on what `U` has learned."""
        self.learn()
        if not self.metric.learned:  # the refresh was thrown away
            self.metric.assign(self.metric.factors())

    def split(self) -> dict[str, float]:
        """Seconds of one refresh by what it spends them on; not for a captured one, which is a single graph."""
        self._watch = Watch(self._clock)
        try:
            whole = self._clock.seconds(self.learn)
            linearise, products = self._watch.linearise.seconds(), self._watch.products.seconds()
            count = len(self._watch.products.spans)
        finally:
            self._watch = None
        return {
            "linearise": linearise,
            "products": products,
            "factors": whole - linearise - products,
            "product": products / count,
            "count": count,
        }

    @contextmanager
    def quadratic(self) -> Iterator[QuadraticModel]:
        """The quadratic model a refresh would learn from."""
        device = self._clock.device
        with frozen(self.model, device), torch.no_grad(), torch.autocast(device.type, enabled=False):
            yield super()._linearise(self._batch)

    def _linearise(self, batch: Any) -> QuadraticModel:
        if self._watch is None:
            return super()._linearise(batch)
        with self._watch.linearise.span():
            inner = super()._linearise(batch)
        return WatchedModel(inner, self._watch)


class Spans:
    """Stretches of a device's time, read when it is over."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.spans: list[tuple[Mark, Mark]] = []

    @contextmanager
    def span(self) -> Iterator[None]:
        start = self._clock.mark()
        yield
        self.spans.append((start, self._clock.mark()))

    def seconds(self) -> float:
        return sum(self._clock.between(start, end) for start, end in self.spans)


class Watch:
    """Where the time of a refresh goes."""

    def __init__(self, clock: Clock) -> None:
        self.linearise, self.products = Spans(clock), Spans(clock)


class WatchedModel:
    """A quadratic model whose products are timed."""

    def __init__(self, inner: QuadraticModel, watch: Watch) -> None:
        self._inner, self._watch = inner, watch
        self.loss, self.gradient = inner.loss, inner.gradient

    def product(self, v: Mapping[str, Tensor]) -> dict[str, Tensor]:
        with self._watch.products.span():
            return self._inner.product(v)

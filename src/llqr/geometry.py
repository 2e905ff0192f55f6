"""What a user holds: the metric `U`, the curvature it is learned from, and when.

A refresh, from top to bottom in `Geometry.refresh`: batch -> quadratic model -> inner loop -> moving average -> accept
or keep the old metric -> report.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.utils.parametrize import ParametrizationList

from llqr.batches import Batches, BatchSource
from llqr.caller_warnings import warn
from llqr.checks import check_capture, check_geometry_settings
from llqr.cuda import CapturedLoop, CapturedMetric
from llqr.curvature import ENGINES, Batch, Divergence, Forward, Loss, QuadraticModel, divergence_named
from llqr.curvature.batch import opened, split_batch
from llqr.curvature.linearizer import Linearizer
from llqr.distributed.dtensors import drop_gathered
from llqr.distributed.placement import Shards, own_part
from llqr.inner import SOLVERS, Inner, Objective, Solution, solve
from llqr.metric import Metric, StructureSpec
from llqr.metric.structure import Bounds, Factors
from llqr.report import Effect, Refresh, RefreshError, RefreshWarning, advice, costs, examine, summarise, warn_if_short
from llqr.runtime import Runtime
from llqr.schedule import Schedule, at, check

#: The paper's inner loop with fewer products.
DEFAULT_INNER = Inner(product_every=3)
#: A warning comes after so many refreshes in a row that change a gradient by less than one per cent.
WEAK_REFRESHES = 3
#: What a saved state counts, and where.
COUNTERS = {
    "step": "_step", "next": "_next", "refreshes": "refreshes", "failures": "failures",
    "failures_in_a_row": "_failures_in_a_row",
}  # fmt: skip


class Geometry:
    """A learned inverse metric `U`, the curvature it is learned from, and its schedule.

    Args:
        model: the network; `torch.compile`d and DDP-wrapped models are seen through. `U` acts on its parameters that
            require a gradient now.
        loss_fn: `loss_fn(outputs, targets)` -> mean loss.
        structure: one of `llqr.STRUCTURES` ("diagonal", "scalar", "kfac", "e-kfac", ...), or patterns -> names.
        divergence: "ngd" (Fisher / Gauss-Newton), "newton", or a `Divergence`.
        every: steps between refreshes (the first comes before step 0), a number or a function of the step; those of
            all optimizers that share the geometry count.
        ema: `beta` of the moving average, likewise (default: the divergence's, 0.95 for ngd and 0.9 for newton).
        damping: weight of `1/2 |delta|^2` in the objective: a number, or a share of the curvature along the gradient,
            such as `"10%"` of `g.Hg / g.g`.
        bounds: `(u_min, u_max)` that the spectrum of `U` is kept in.
        inner: how a refresh minimises the objective, see `llqr.Inner` (default: the paper's heavy ball, with a product
            in every third step: 19 products per refresh).
        runtime: how a refresh is computed (engine, precision, CUDA graphs, memory), see `llqr.Runtime`.
        forward: `forward(model, inputs)` -> outputs, for models that are not called as `model(inputs)`.
        shards: how many ranks (of DDP or `Runtime.process_group`) divide the metric among them: "all", or a divisor of
            their number. Each holds, learns and applies its own blocks only, and `metric` is that part. By default
            every rank holds the whole metric.
        on_refresh: called with the report of every refresh.

    Attributes:
        metric: `U`.
        refreshes: how many there have been.
        failures: how many of those kept the old metric.

    Example:
        >>> model = nn.Linear(4, 3)
        >>> geometry = Geometry(model, nn.functional.cross_entropy, structure="kfac", every=500)
        >>> batch = torch.randn(8, 4), torch.randint(3, (8,))
        >>> geometry.due, geometry.refresh(batch).accepted, geometry.due
        (True, True, False)

    `geometry.batches = loader` lets it draw its own batches. `forward` returns the outputs that `loss_fn` takes, never
    the loss itself: `lambda model, inputs: model(**inputs).logits` for a model that computes its own loss.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Loss,
        *,
        structure: StructureSpec = "e-kfac",
        divergence: str | Divergence = "ngd",
        every: Schedule = 500,
        ema: Schedule | None = None,
        damping: float | str = 0.0,
        bounds: Bounds = None,
        inner: Inner | None = None,
        runtime: Runtime | None = None,
        forward: Forward | None = None,
        shards: Shards = None,
        on_refresh: Callable[[Refresh], None] | None = None,
    ) -> None:
        check_geometry_settings(inner, runtime, damping, on_refresh)
        self.divergence = divergence_named(divergence)
        self.inner = inner = inner or DEFAULT_INNER
        self.runtime = runtime = runtime or Runtime()
        self._every, self._ema = every, self.divergence.ema if ema is None else ema
        check("every", self._every, 1)
        check("ema", self._ema, 0, 1)
        self._damping = damping if isinstance(damping, str) else float(damping)
        self._on_refresh = on_refresh
        scale = inner.curvature_scale
        scaled = self.divergence if scale is None else replace(self.divergence, scale=scale)
        self.linearizer = Linearizer(model, loss_fn, scaled, runtime, forward)
        whole = Metric(
            self.model,
            self.parameters,
            structure,
            bounds=bounds,
            dtype=runtime.dtype,
            apply_dtype=runtime.apply_dtype,
            max_side=runtime.max_side,
        )
        self.metric = own_part(whole, self.parameters, shards, self.linearizer.ranks.group)
        if self.metric is not whole:
            self.linearizer.share_out(self.metric.placement)
        SOLVERS[inner.solver].check(self.metric)
        if inner.normalise:
            self.metric.check_scalable()
        if runtime.capture:
            check_capture(self.metric, self.parameters)
        # Of the factors' matrix products in a refresh: float16 is too narrow, and autocast leaves float64 alone.
        narrow = all(parameter.dtype.itemsize <= 4 for parameter in self.parameters.values())
        self._precision = torch.bfloat16 if narrow and runtime.autocast == torch.bfloat16 else None
        self._action = CapturedMetric(self.metric) if runtime.capture else self.metric
        self._captured: CapturedLoop | None = None
        self._names = {parameter: name for name, parameter in self.parameters.items()}
        lists = [module for module in self.model.modules() if isinstance(module, ParametrizationList)]
        self._parametrized = {parameter for originals in lists for parameter in originals.parameters(recurse=False)}
        self._batches = BatchSource()
        self.refreshes = self.failures = 0
        self._failures_in_a_row = self._weak_in_a_row = 0
        self._step = self._next = 0
        self._last: Refresh | None = None  # that was accepted
        self._layers: dict[str, Effect] = {}

    @property
    def model(self) -> nn.Module:
        """The network inside `torch.compile` and DDP."""
        return self.linearizer.model

    @property
    def parameters(self) -> dict[str, Tensor]:
        """What `U` acts on, by name."""
        return self.linearizer.parameters

    @property
    def shards(self) -> int:
        """Among how many ranks the metric is shared out."""
        return self.metric.placement.shards

    @property
    def engine(self) -> str:
        """What multiplies by `H`; "auto" until the first refresh has chosen."""
        return self.linearizer.engine

    @property
    def due(self) -> bool:
        """Whether the next optimizer step begins with a refresh, which needs a batch."""
        return self._step >= self._next

    def advance(self) -> None:
        """Count an optimizer step."""
        self._step += 1

    def memory(self) -> dict[str, int]:
        """Bytes of the factors per structure, planned and allocated."""
        return self.metric.memory()

    def estimate(self, batch: Batch, *, steps: int | None = None) -> dict[str, float]:
        """Seconds and bytes (on a CUDA device, at the peak, which it resets) of a refresh and of `U g`, measured.

        Takes as long as a refresh and learns nothing. Warns if training is planned for so few `steps` that there are
        fewer refreshes than `1 / (1 - ema)`.
        """
        if steps is not None and not self.inner.debias:
            warn_if_short(steps, self._every, at(self._ema, 0, "ema", 0, 1))
        with self.linearizer.frozen():
            drawn = self.linearizer.agreed(lambda: self._drawn(batch))
            g, factors = self._linearised(drawn).gradient, self.metric.apply_factors()  # also chooses the engine
            if self.runtime.capture or self.runtime.compile:
                self._solved(drawn)
            runs = {
                "refresh": lambda: self._averaged(self._solved(drawn)),
                "apply": lambda: self.metric.apply(g, factors),
            }
            return costs(runs, self.linearizer.device)

    @property
    def batches(self) -> Batches | None:
        """Where refreshes take their batches from if a step is given none: an iterable such as a `DataLoader`, which
        starts over when it ends, or a function. Tensors move to the model's device.

        A state dictionary has the position: batches go on where they were in an iterable whose order is fixed or drawn
        from torch's generator. Load it before or after setting this.

        Example:
            >>> model = nn.Linear(4, 3)
            >>> geometry = Geometry(model, nn.functional.cross_entropy)
            >>> geometry.batches = [(torch.randn(8, 4), torch.randint(3, (8,)))]
            >>> geometry.refresh().accepted
            True
        """
        return self._batches.source

    @batches.setter
    def batches(self, batches: Batches | None) -> None:
        self._batches.draw_from(batches)

    # -- learning ----------------------------------------------------------------------------------------------------

    def refresh_if_due(self, batch: Any) -> None:
        """Called before every optimizer step."""
        self.metric.follow(self.parameters)
        if self.due:
            self.refresh(self._missing if batch is None and self.batches is None else batch)

    def _missing(self) -> Batch:
        """Raise inside `agreed`, so that a rank without a batch does not leave the others waiting."""
        raise ValueError(
            f"batch: a refresh is due at step {self._step}; pass batch=(inputs, targets) to step, first_step or "
            "repeat_at_probe, or set geometry.batches; in Lightning, Hugging Face and Accelerate, see "
            "llqr.integrations"
        )

    @_disable_dynamo
    def refresh(self, batch: Batch | Callable[[], Batch] | None = None) -> Refresh:
        """Learn `U` on one batch (default: the next of `batches`) and report what happened.

        On a numerical failure the old metric stays.
        """
        if torch.is_inference_mode_enabled():
            raise RuntimeError("refresh: torch has no derivatives inside inference_mode(); use no_grad() around it")
        started = time.perf_counter()
        self._check_parameters()
        following = self._step + max(1, round(at(self._every, self._step, "every", 0)))
        averaged: list[Factors] = []
        try:
            with self.linearizer.frozen():
                drawn = self.linearizer.agreed(lambda: self._drawn(batch))
                solution = self._solved(drawn)
                averaged = self._averaged(solution)
                report, layers = examine(self.metric, solution, averaged, self._step)
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
            report, layers = Refresh(self._step, accepted=False, reason=f"a decomposition failed ({error})"), {}
        report = replace(report, engine=self.engine, seconds=time.perf_counter() - started)
        if report.accepted:
            self.metric.assign(averaged)
            self._last, self._layers = report, layers
        self.refreshes += 1
        self.failures += not report.accepted
        self._failures_in_a_row = 0 if report.accepted else self._failures_in_a_row + 1
        self._next = following
        if self._on_refresh is not None:
            self._on_refresh(report)
        self._warn(report)
        return report

    def _check_parameters(self) -> None:
        """Raise if the model has other parameters than when the geometry was made; follow them to another device."""
        drop_gathered(self.model.modules())
        now = dict(self.model.named_parameters())
        for name, parameter in self.parameters.items():
            if now.get(name) is not parameter:
                raise RuntimeError(
                    f"model: {name!r} is another tensor than when the geometry was made (load_state_dict with "
                    "assign=True, or a wrapper, replaces them); make the geometry after that"
                )
        self.metric.follow(self.parameters)

    def _drawn(self, batch: Batch | Callable[[], Batch] | None) -> Batch:
        if batch is None or callable(batch):
            batch = self._batches.draw(batch, self.linearizer.device, self.refreshes)
        split = split_batch(batch)  # raises here, where other ranks do not wait for this one yet
        return opened(split) if self.runtime.capture else batch

    def _linearised(self, batch: Batch) -> QuadraticModel:
        return self.linearizer.linearise(self.linearizer.problem(batch))

    def _solved(self, batch: Batch) -> Solution:
        """What the inner loop learns, eagerly or as CUDA graphs."""
        if not self.runtime.capture or not self.metric.stored():
            objective = Objective(self.metric, self._linearised(batch), self._damping, self._precision)
            return solve(objective, self.inner, at(self.inner.lr, self._step, "lr", 0))
        if self._captured is None or not self._captured.fits(batch):
            self._captured = None  # frees the old graphs before new ones are captured
            given = self.metric, self.inner, self._damping, self._precision, self.model
            self._captured = CapturedLoop(*given, self._linearised, batch, self._step)
        return self._captured.solve(batch, self._step)

    def _averaged(self, solution: Solution) -> list[Factors]:
        """The factors of the metric as it would become. A decomposition that fails on one rank fails on all."""
        metric, factors = self.metric, solution.factors
        beta = at(self._ema, self._step, "ema", 0, 1)
        if self.inner.debias:
            accepted = self.refreshes - self.failures
            beta = min(beta, accepted / (accepted + 1))

        def constrained(factors: list[Factors]) -> list[Factors]:
            return self.linearizer.agreed(lambda: metric.constrain(factors))

        if not (self.inner.normalise and metric.stored()):
            return constrained(metric.average(factors, beta))
        g = solution.gradient
        # Before, so that old and new weigh what `beta` says; after, because products of averages and what was outside
        # the bounds are others then.
        averaged = constrained(metric.average(metric.normalised(factors, g), beta))
        return constrained(metric.normalised(averaged, g))

    def _warn(self, report: Refresh) -> None:
        """Of a rejected refresh, or of a metric that does nearly nothing; too many failures raise."""
        if not report.accepted:
            message = f"refresh at step {report.step}: kept the old metric, because {report.reason}"
            if self.failures == 1:
                warn(message + " (said once; see Geometry.failures)", RefreshWarning)
            if self._failures_in_a_row >= self.runtime.max_failures:
                limit = f"max_failures={self.runtime.max_failures}"
                raise RefreshError(f"{message}; {self._failures_in_a_row} in a row ({limit})")
        elif self.metric.stored():
            self._weak_in_a_row = self._weak_in_a_row + 1 if advice(report.change) else 0
            if self._weak_in_a_row == WEAK_REFRESHES:
                warn(advice(report.change), RefreshWarning)

    @contextmanager
    def quadratic_model(self, batch: Batch) -> Iterator[QuadraticModel]:
        """The quadratic model that a refresh on this batch would learn from; freezes the model while entered.

        Of a metric that is shared out, its vectors are those of this rank's blocks, by their names.
        """
        with self.linearizer.frozen():
            yield self._linearised(batch)

    def summary(self) -> str:
        """What `U` does to a gradient, in a sentence, and the layers that it changes most and least.

        Measured on the inner gradient of the last accepted refresh.
        """
        if self._last is None and self.metric.learned:
            return "U was learned before its state was loaded; what it does is measured at the next refresh."
        return summarise(self._last, self._layers, self.refreshes - self.failures)

    def layer_effects(self) -> dict[str, Effect]:
        """What `U` does to each layer's part of a gradient: change, cosine and gain (see `summary`)."""
        return dict(self._layers)

    # -- use -----------------------------------------------------------------------------------------------------------

    def transport(self, parameters: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
        """`U g` for gradients that stand beside their parameters; parameters of other models pass unchanged.

        A gradient hook or a parametrization (the signs in `orthogonal`) may make some entries constant. Their gradient
        is zero, and a `U` that mixes entries would move them: for such parameters `U` acts on the other entries alone.
        """
        if not self.metric.learned:
            return list(grads)
        names = [self._names.get(parameter) for parameter in parameters]
        known = {name: g for name, g in zip(names, grads, strict=True) if name is not None}
        placement = self.metric.placement
        Ug = placement.to_local(self._action.apply(placement.to_owner(known)), known)
        for parameter, name in zip(parameters, names, strict=True):
            hooks = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
            if name is not None and (hooks or parameter in self._parametrized):
                Ug[name] = Ug[name].masked_fill(known[name] == 0, 0)
        return [g if name is None else Ug[name] for name, g in zip(names, grads, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs to go on bit-exactly."""
        return {
            "metric": self.metric.state_dict(),
            "engine": self.engine,
            "counters": {name: getattr(self, attribute) for name, attribute in COUNTERS.items()},
            "batches": self._batches.state(),
            "saved_by": self.linearizer.ranks.place,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The position in `batches` is each rank's own: where the state is another rank's, or of another number of
        ranks (as `torch.distributed.checkpoint` gives it), batches begin again.
        """
        counters = {attribute: int(state["counters"][name]) for name, attribute in COUNTERS.items()}
        if state["engine"] not in ("auto", *ENGINES):
            raise ValueError(f"state_dict: unknown engine {state['engine']!r}")
        here = state["saved_by"] == self.linearizer.ranks.place
        batches = state["batches"] if here else None
        self.metric.load_state_dict(state["metric"])
        self.linearizer.resume(state["engine"])
        self._batches.load(batches)
        vars(self).update(counters)
        self._last, self._layers, self._weak_in_a_row = None, {}, 0  # the next refresh measures again what `U` does

    def __getstate__(self) -> dict[str, Any]:
        """Without CUDA graphs, which cannot be copied and are captured again."""
        return self.__dict__ | {"_captured": None}


class FixedGeometry:
    """A metric that is given, not learned: pairs of a parameter and a function `gradient -> U gradient`.

    Example:
        >>> weight = nn.Parameter(torch.ones(2))
        >>> geometry = FixedGeometry([(weight, lambda g: 3 * g)])
        >>> geometry.transport([weight], [torch.ones(2)])[0].tolist()
        [3.0, 3.0]
    """

    due = False
    model = None
    batches = None

    def __init__(self, metric: Iterable[tuple[Tensor, Callable[[Tensor], Tensor]]]) -> None:
        self._apply = dict(metric)

    def refresh_if_due(self, batch: Any) -> None:
        pass

    def advance(self) -> None:
        pass

    def transport(self, parameters: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
        return [self._apply[p](g) if p in self._apply else g for p, g in zip(parameters, grads, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            raise ValueError("state_dict: a fixed geometry holds no state, but the saved one does")


#: What the optimizer takes; one of your own needs the methods of `FixedGeometry`.
GeometryLike = Geometry | FixedGeometry

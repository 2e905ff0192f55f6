"""What a user holds: the metric, the curvature it is learned from, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from llqr.curvature import ENGINES, Batch, Divergence, Forward, Loss, QuadraticModel, divergence_named
from llqr.curvature.linearizer import Linearizer
from llqr.distributed.foreign_state import for_this_rank
from llqr.distributed.shards import Shards, own_part
from llqr.geometry.arguments import check_capture, check_types
from llqr.geometry.batches import Batches, BatchSource
from llqr.geometry.members import Members
from llqr.geometry.outcomes import COUNTERS, Outcomes
from llqr.geometry.runtime import Runtime
from llqr.metric import Metric, StructureSpec
from llqr.metric.captured import CapturedMetric
from llqr.metric.structure import Bounds, Factors
from llqr.random_state import vary
from llqr.refresh.effect import Effect
from llqr.refresh.guards import Findings, examine, objection
from llqr.refresh.inner_loop import InnerProblem, Solution
from llqr.refresh.progress import Progress
from llqr.refresh.refresher import Refresher
from llqr.refresh.report import Refresh
from llqr.schedule import Schedule, at, check
from llqr.solvers import SOLVERS, Inner
from llqr.solvers.damping import Damping
from llqr.solvers.objective import PRECISIONS

#: The paper's inner loop with fewer products; what it learns differs from that of all products by less than a per cent.
DEFAULT_INNER = Inner(product_every=3)


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
        ema: `beta` of the moving average (default: the divergence's, 0.95 for ngd and 0.9 for newton), likewise.
        damping: weight of `1/2 |delta|^2` in the objective: a number, or a share of the curvature along the gradient,
            such as `"10%"` of `g.Hg / g.g`.
        bounds: `(u_min, u_max)` that the spectrum of `U` is kept in.
        inner: how a refresh minimises the objective, see `llqr.Inner` (default: the paper's heavy ball, with a product
            in every third step: 19 products per refresh).
        runtime: how a refresh is computed (engine, precision, CUDA graphs, memory), see `llqr.Runtime`.
        forward: `forward(model, inputs)` -> outputs, for models that are not called as `model(inputs)`.
        shards: among how many of the ranks that train the model (DDP, or `Runtime.process_group`) the metric is shared
            out: "all", or a number that divides them. Each holds, learns and applies its own blocks only, and `metric`
            is that part. By default every rank holds all of it.
        on_refresh: called with the report of every refresh.

    Example:
        >>> model = nn.Linear(4, 3)
        >>> geometry = Geometry(model, nn.functional.cross_entropy, structure="kfac", every=500)
        >>> batch = torch.randn(8, 4), torch.randint(3, (8,))
        >>> geometry.due, geometry.refresh(batch).accepted, geometry.due
        (True, True, False)

    `geometry.batches = loader` lets it draw its own batches. Models that are not called as `model(inputs)` have an
    adapter, `forward`, which returns the outputs that `loss_fn` takes, never the loss itself: for a model that computes
    its own loss `lambda model, inputs: model(**inputs).logits` (the labels are not among the inputs), for one with
    several outputs `lambda model, inputs: torch.cat(model(inputs), -1)` and a `loss_fn` that takes them apart. A causal
    language model, whose targets are its inputs one place further, has `loss_fn=llqr.ShiftedCrossEntropy()`.
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
        check_types(inner, runtime, on_refresh)
        self.divergence = divergence_named(divergence)
        self.inner = inner = inner or DEFAULT_INNER
        self.runtime = runtime = runtime or Runtime()
        ema = self.divergence.ema if ema is None else ema
        check("every", every, 1)
        check("ema", ema, 0, 1)
        self.linearizer = Linearizer(
            model,
            loss_fn,
            self.divergence,
            runtime,
            scale=inner.curvature_scale,
            forward=forward,
        )
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
            check_capture(self.metric, inner.solver, self.parameters)
        problem = InnerProblem(self.metric, inner, Damping.of(damping), self._precision(), runtime.compile)
        self._refresher = Refresher(problem, self.linearizer, capture=runtime.capture, spread=runtime.spread)
        self._action = CapturedMetric(self.metric) if runtime.capture else self.metric
        self._every, self._ema, self._on_refresh = every, ema, on_refresh
        self._members = Members(self.model, self.parameters, self.metric)
        self._outcomes = Outcomes(self.metric, runtime.max_failures)
        self._step = 0
        self._next = 0
        self._batches = BatchSource()

    def _precision(self) -> torch.dtype | None:
        """Of the factors' matrix products in a refresh. Autocast leaves float64 alone."""
        narrow = all(parameter.dtype.itemsize <= 4 for parameter in self.parameters.values())
        return self.runtime.autocast if narrow and self.runtime.autocast in PRECISIONS else None

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
    def refreshes(self) -> int:
        """How many have been made."""
        return self._outcomes.refreshes

    @property
    def failures(self) -> int:
        """How many of them were rejected."""
        return self._outcomes.failures

    @property
    def due(self) -> bool:
        """Whether a refresh begins at the next optimizer step, which then needs a batch."""
        return self._step >= self._next

    def advance(self) -> None:
        """One optimizer step is done."""
        self._step += 1

    def memory(self) -> dict[str, int]:
        """Bytes of the factors per structure, planned and allocated."""
        return self.metric.memory()

    # -- learning ----------------------------------------------------------------------------------------------------

    @property
    def batches(self) -> Batches | None:
        """Where refreshes take their batches from if a step is given none: an iterable such as a `DataLoader`, which
        is begun again when it ends, or a function. Tensors are moved to the model's device.

        A state dictionary has the position: batches go on where they were in an iterable whose order is fixed or drawn
        from torch's generator, and in one that has a `state_dict` of its own. It may be loaded before this is set.

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

    @torch._disable_dynamo
    def refresh(self, batch: Batch | Callable[[], Batch] | None = None) -> Refresh:
        """Learn `U` on one batch, all at once, and report what happened. On a numerical failure the old metric stays.

        Without a batch, the next one of `batches`. A spread refresh under way is dropped.
        """
        progress = self._begin(batch)
        report = self._work(progress, progress.until)
        assert report is not None
        return report

    @torch._disable_dynamo
    def learn_from(self, quadratic: QuadraticModel) -> Refresh:
        """A refresh on a quadratic model that is given, all at once."""
        self._members.check()
        self._refresher.release()
        progress = Progress(self._step, self._until(), {})
        with self.linearizer.frozen():
            progress.loop = self._refresher.loop_on(quadratic, self._step)
        report = self._work(progress, progress.until)
        assert report is not None
        return report

    @contextmanager
    def quadratic_model(self, batch: Batch) -> Iterator[QuadraticModel]:
        """The quadratic model that a refresh on this batch would learn from; the model is frozen while entered.

        Of a metric that is shared out, its vectors are those of this rank's blocks, by their names.
        """
        with self.linearizer.frozen():
            yield self.linearizer.linearise(self.linearizer.problem(batch))

    @torch._disable_dynamo
    def refresh_if_due(self, batch: Any) -> None:
        """Do what the next optimizer step owes: a whole refresh when one is due, or its share of one that is spread."""
        refresher = self._refresher
        if self.metric.learned and not self._members.in_place(self.metric.whole.blocks[0]):
            self._members.check()
        if refresher.progress is not None:
            self._work(refresher.progress, self._step)
        if not self.due:
            return
        if batch is None and self.batches is None:
            raise ValueError(
                f"batch: a refresh is due at step {self._step}; pass step(closure, batch=(inputs, targets)), "
                "or set geometry.batches; in Lightning, Hugging Face and Accelerate, see llqr.integrations"
            )
        if not refresher.spread:
            self.refresh(batch)
            return
        progress = self._begin(batch)
        if self._work(progress, self._step) is None:
            refresher.progress, self._next = progress, progress.until

    def _begin(self, batch: Batch | Callable[[], Batch] | None) -> Progress:
        if torch.is_inference_mode_enabled():
            raise RuntimeError("refresh: torch has no derivatives inside inference_mode(); use no_grad() around it")
        self._members.check()
        given = partial(self._batches.draw, self.linearizer.device) if batch is None else batch

        def begin() -> Progress:
            vary(self.linearizer.device, self.refreshes)  # or a function would draw the same batch at every refresh
            return self._refresher.begin(given, self._step, self._until())

        with self.linearizer.frozen():
            return self.linearizer.agreed(begin)

    def _until(self) -> int:
        """The step at which the refresh after the one that begins now is due."""
        return self._step + max(1, round(at(self._every, self._step, "every", 0)))

    def _work(self, progress: Progress, step: int) -> Refresh | None:
        """The inner steps owed before this optimizer step; the report, if they were the last."""
        if progress.up_to_date(step):
            return None
        blended: list[Factors] = []
        try:
            with self.linearizer.frozen():
                loop = self._refresher.advance(progress, step)
                if loop is None:
                    return None
                solution = loop.solution()
                blended = self._blended(solution, loop.quadratic, self._beta(progress.step))
                found = examine(self.metric, loop.quadratic, solution, blended)
                reason = objection(found)
            if not reason:
                self.metric.assign(blended)
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
            found, reason = Findings(), f"a decomposition failed ({error})"
        except BaseException:
            progress.loop = None  # a retry repeats its steps
            raise
        return self._finish(progress, found, reason)

    def _blended(self, solution: Solution, quadratic: QuadraticModel, beta: float) -> list[Factors]:
        """The factors of the metric as it would become. A decomposition that fails on one rank fails on all."""
        metric, factors = self.metric, solution.factors
        if self.inner.normalise and metric.stored():
            gradients = quadratic.gradients or (quadratic.gradient,)
            # Before, so that old and new weigh what `beta` says; after, because products of averages are other ones.
            factors = metric.normalised(metric.average(metric.normalised(factors, gradients), beta), gradients)
        else:
            factors = metric.average(factors, beta)
        return self.linearizer.agreed(lambda: metric.constrain(factors))

    def _beta(self, step: int) -> float:
        """The weight of the old metric in the moving average."""
        beta = at(self._ema, step, "ema", 0, 1)
        accepted = self._outcomes.accepted
        return min(beta, accepted / (accepted + 1)) if self.inner.debias else beta

    def _finish(self, progress: Progress, found: Findings, reason: str) -> Refresh:
        self._refresher.release()
        self._next = progress.until
        report = self._outcomes.report(progress, found, reason, self.engine, self._beta(progress.step))
        if self._on_refresh is not None:
            self._on_refresh(report)
        self._outcomes.judge(report, found)
        return report

    def summary(self) -> str:
        """What `U` does to a gradient, in a sentence, and the layers that it changes most and least.

        Measured on the inner gradient of the last accepted refresh.
        """
        return self._outcomes.summary()

    def layer_effects(self) -> dict[str, Effect]:
        """What `U` does to each layer's part of a gradient: change, cosine and gain (see `summary`)."""
        return dict(self._outcomes.layers)

    def claim(self, parameters: Iterable[Tensor]) -> None:
        """Said by an optimizer with this geometry: it moves these. A refresh names those that no optimizer moves."""
        self._members.claim(parameters)

    # -- use -----------------------------------------------------------------------------------------------------------

    def transport(self, parameters: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
        """`U g` for gradients that stand beside their parameters; parameters of other models pass unchanged."""
        if not self.metric.learned:
            return list(grads)
        names = [self._members.names.get(parameter) for parameter in parameters]
        known = {name: g for name, g in zip(names, grads, strict=True) if name is not None}
        placement = self.metric.placement
        try:
            Ug = placement.to_local(self._action.apply(placement.to_owner(known)), known)
        except RuntimeError:
            self._members.check()
            raise
        return [g if name is None else Ug[name] for name, g in zip(names, grads, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs to go on bit-exactly."""
        return {
            "metric": self.metric.state_dict(),
            "engine": self.engine,
            "counters": {"step": self._step, "next": self._next} | self._outcomes.state(),
            "refresh": self._refresher.state(),
            "batches": self._batches.state(),
            "saved_by": self.linearizer.ranks.place,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """In the middle of a spread refresh, its steps so far are repeated at the next optimizer step.

        A refresh under way and the position in `batches` are each rank's own: where the state is another rank's, or of
        another number of ranks (as `torch.distributed.checkpoint` gives it), both begin again.
        """
        state = for_this_rank(state, self.linearizer)
        counters = {key: int(state["counters"][key]) for key in ("step", "next", *COUNTERS)}
        if state["engine"] not in ("auto", *ENGINES):
            raise ValueError(f"state_dict: unknown engine {state['engine']!r}")
        restore = self._refresher.restored(state.get("refresh"), self.metric.blocks[0].device)
        self.metric.load_state_dict(state["metric"])
        restore()
        self.linearizer.resume(state["engine"])
        self._batches.load(state.get("batches"))
        self._outcomes.load({**state["counters"], **counters})
        self._step, self._next = counters["step"], counters["next"]

"""The inner loop of a refresh: its settings, the solvers by name (a new one is a class in `SOLVERS`), and the loop."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from llqr.checks import check_inner
from llqr.curvature.divergence import Scale
from llqr.curvature.quadratic import Named
from llqr.inner.objective import Evaluation, Extrapolation, Objective
from llqr.metric import Factors, Metric
from llqr.metric.layout import Packed
from llqr.metric.structure import flattened
from llqr.schedule import Schedule

#: One step of the inner loop. "first" reads the objective at the start and moves; "product" moves, with a product with
#: `H`; "extrapolate" moves, with `H v` extrapolated from earlier products; "last" reads the objective at the end. The
#: guards compare the two objectives, which may differ by less than a lower precision rounds away: "first" and "last"
#: run in the factors' own precision, whatever the steps between them run in.
Step = Literal["first", "product", "extrapolate", "last"]


@dataclass(frozen=True)
class Inner:
    """How a refresh minimises the objective `J(U)`.

    Attributes:
        solver: "heavy-ball" (the paper's) or "adam"; for scalar and diagonal metrics also "pcg", preconditioned
            conjugate gradients that start from the best multiple.
        steps: inner steps per refresh; one more product with H reads the objective at the end.
        lr: step size of heavy ball and adam, a number or a function of the optimizer step.
        momentum: of heavy ball; zero at the start of every refresh.
        clip: bound on the norm of each factor's gradient (of each layer's for diagonal and scalar); pcg has none.
        product_every: of heavy ball and adam: after the first two steps, one inner step in so many makes a product with
            H; the others extrapolate H U g, as H is linear. Without `inner=`, `Geometry` has 3.
        curvature_scale: "sum", "mean" or a number that multiplies the curvature of the mean loss (default: the
            divergence's; "sum" for ngd, where the curvature weighs the inner batch size times the linear term).
        normalise: scale U so that g.Ug = g.g on the inner batch, so that learning rates and radii keep their meaning.
        debias: give the t-th refresh the weight 1 / t until that falls below 1 - ema, so that the moving average does
            not remember the identity it starts from.

    Example:
        >>> Inner("pcg", steps=10).solver
        'pcg'
    """

    solver: str = "heavy-ball"
    steps: int = 50
    lr: Schedule = 1e-3
    momentum: float = 0.9
    clip: float = 5.0
    product_every: int = 1
    curvature_scale: Scale | None = None
    normalise: bool = False
    debias: bool = False

    def __post_init__(self) -> None:
        check_inner(self, SOLVERS)

    def plan(self) -> tuple[Step, ...]:
        """What each step of a refresh does; the last one only reads the objective.

        The first two moves make a product of their own, because an extrapolation needs two; after them one move in
        `product_every` does.

        Example:
            >>> Inner(steps=5, product_every=3).plan()
            ('first', 'product', 'extrapolate', 'product', 'extrapolate', 'last')
        """
        between: list[Step] = [
            "product" if k < 2 or k % self.product_every == 0 else "extrapolate" for k in range(1, self.steps)
        ]
        return ("first", *between, "last")


class Solver(ABC):
    """Moves a copy of the metric's factors, in place, with at most one product with `H` per step.

    Args:
        lr: step size; a tensor where CUDA graphs change it between replays.
    """

    name: ClassVar[str]
    #: Whether a step can do with an extrapolated product.
    extrapolates: ClassVar[bool] = False

    def __init__(self, metric: Metric, inner: Inner, lr: float | Tensor) -> None:
        self.check(metric)
        self.metric, self.inner, self.lr = metric, inner, lr
        self.factors: list[Factors] = [
            {name: factor.detach().to(group.dtype, copy=True).contiguous() for name, factor in own.items()}
            for group, own in zip(metric.groups, metric.factors(), strict=True)
        ]
        self._flat = flattened(self.factors)
        self._memory: list[Tensor] = []  # of the steps so far

    @classmethod  # noqa: B027 - most solvers learn any metric
    def check(cls, metric: Metric) -> None:
        """Raise for a metric that it cannot learn."""

    @abstractmethod
    def step(self, objective: Objective) -> Tensor:
        """One step with a product; returns the objective it started from."""

    def advance(self, objective: Objective, *, product: bool) -> None:
        """One step without reading the objective; extrapolates unless it makes a product."""
        self.step(objective)

    def value(self, objective: Objective) -> Tensor:
        """The objective at the current factors."""
        return objective.exact.at(self.factors).value

    def restart(self) -> None:
        """Forget the steps so far; captured loops start every refresh with this."""
        for tensor in self._memory:
            tensor.zero_()


class Descent(Solver):
    """A first-order method of `torch.optim` on clipped slopes. Slopes that are not finite count as zero."""

    extrapolates = True

    def __init__(self, metric: Metric, inner: Inner, lr: float | Tensor) -> None:
        super().__init__(metric, inner, lr)
        self._products = Extrapolation(metric.quick_dot) if inner.product_every > 1 else None

    def step(self, objective: Objective) -> Tensor:
        here = objective.at(self.factors, self._products)
        self._move(here)
        return here.value

    def advance(self, objective: Objective, *, product: bool) -> None:
        self._move(objective.at(self.factors, self._products, product=product))

    def _move(self, here: Evaluation) -> None:
        pairs = zip(self.metric.groups, here.slopes(finite=True), strict=True)
        each = [partial(group.clipped, slopes, self.inner.clip) for group, slopes in pairs]
        self._update(flattened(here.objective.side_by_side(each)))

    @abstractmethod
    def _update(self, slopes: list[Tensor]) -> None: ...

    def restart(self) -> None:
        super().restart()
        if self._products is not None:
            self._products.forget()


class HeavyBall(Descent):
    """`m <- momentum m + clip(grad)`, `F <- F - lr m`: exactly torch's SGD with momentum."""

    name = "heavy-ball"

    def __init__(self, metric: Metric, inner: Inner, lr: float | Tensor) -> None:
        super().__init__(metric, inner, lr)
        self._memory = [torch.zeros_like(factor) for factor in self._flat]

    def _update(self, slopes: list[Tensor]) -> None:
        # The function, because the class around it takes longer than the arithmetic of a small network.
        sgd(
            self._flat,
            slopes,
            [*self._memory],  # a list that may hold None, for those who let it make the momenta
            fused=True,
            weight_decay=0.0,
            momentum=self.inner.momentum,
            lr=self.lr,  # type: ignore[arg-type]  # SGD passes tensors on, too
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


class Adam(Descent):
    """torch's Adam on the clipped slopes."""

    name = "adam"

    def __init__(self, metric: Metric, inner: Inner, lr: float | Tensor) -> None:
        super().__init__(metric, inner, lr)
        on_cuda = all(factor.is_cuda for factor in self._flat)
        self._optimizer = torch.optim.Adam(self._flat, lr=lr, capturable=on_cuda, fused=on_cuda)

    def _update(self, slopes: list[Tensor]) -> None:
        for factor, slope in zip(self._flat, slopes, strict=True):
            factor.grad = slope
        self._optimizer.step()
        self._optimizer.zero_grad()  # frees the gradients, which would lie beside the activations in the next product

    def restart(self) -> None:
        self._memory = [tensor for state in self._optimizer.state.values() for tensor in state.values()]
        super().restart()


class PreconditionedCG(Solver):
    """The exact minimiser for structures that scale entries (scalar, diagonal).

    There `U g = u * g`, and `J` is quadratic in the factors `u`: `A u = b` with `b = g^2` and
    `A u = g * (H + damping)(u * g)`, both summed over a layer for a scalar. Conjugate gradients (Polak-Ribiere),
    preconditioned by `diag(b)`, start from the current factors times their best multiple, which the first step gives
    for free. Along a direction without positive curvature a step has length zero. Memory stays in place, for graphs.
    """

    name = "pcg"

    def __init__(self, metric: Metric, inner: Inner, lr: float | Tensor) -> None:
        super().__init__(metric, inner, lr)
        self._weights, self._slopes, self._direction = ([torch.zeros_like(u) for u in self._flat] for _ in range(3))
        self._size = torch.zeros((), dtype=torch.float64, device=self._flat[0].device)
        self._residual: Packed = []
        self._memory = [*self._slopes, *self._direction, self._size]

    @classmethod
    def check(cls, metric: Metric) -> None:
        other = sorted({group.name for group in metric.whole.groups if group.shapes() and not group.scales_entries})
        if other:
            raise ValueError(
                "solver: 'pcg' is for structures that scale entries (scalar, diagonal), which "
                f"{', '.join(other)} does not; choose heavy-ball or adam"
            )

    def step(self, objective: Objective) -> Tensor:
        """The first step: evaluate `J`, move to the best multiple of the factors, and set up the preconditioner."""
        dot = self.metric.dot
        here = objective.at(self.factors)
        before, linear = here.value, dot(objective.g, here.Ug)
        quadratic = dot(here.residual, here.Ug) + linear
        # Blocks that are left as they are would not follow a multiple.
        follow = all(group.shapes() for group in self.metric.whole.groups)
        multiple = torch.where((linear > 0) & (quadratic > 0) & follow, linear / quadratic, 1.0)
        torch._foreach_mul_(self._flat, [multiple.to(u) for u in self._flat])
        for residual, g in zip(here.residual, objective.g, strict=True):
            residual.mul_(multiple.to(g)).addcmul_(g, (multiple - 1).to(g))
        if not self._residual:
            self._residual = [torch.empty_like(part) for part in here.residual]
        torch._foreach_copy_(self._residual, here.residual)
        torch._foreach_copy_(self._weights, flattened(objective.pulled(here.pulls, objective.g)))
        return before

    def value(self, objective: Objective) -> Tensor:
        return objective.known(self.factors, self._residual).value

    def advance(self, objective: Objective, *, product: bool) -> None:
        """To the lowest point of `J` along a conjugate direction, with the residual there."""
        dot = self.metric.dot
        slopes = flattened(objective.known(self.factors, self._residual).slopes())
        steepest = [torch.where(b > 0, slope / b, 0.0) for slope, b in zip(slopes, self._weights, strict=True)]
        size = dot(slopes, steepest)
        share = torch.where(self._size > 0, (size - dot(self._slopes, steepest)) / self._size, 0.0).clamp_min(0.0)
        for direction, way in zip(self._direction, steepest, strict=True):
            direction.mul_(share.to(direction)).sub_(way)
        torch._foreach_copy_(self._slopes, slopes)
        self._size.copy_(size)
        directions = iter(self._direction)
        Ug, HUg = objective.along([{name: next(directions) for name in own} for own in self.factors])
        fall, curvature = -dot(slopes, self._direction), dot(Ug, HUg)
        length = torch.where(curvature > 0, fall / curvature, 0.0)
        for moving, ways in ((self._flat, self._direction), (self._residual, HUg)):
            for tensor, way in zip(moving, ways, strict=True):
                tensor.addcmul_(way, length.to(tensor))


SOLVERS: dict[str, type[Solver]] = {solver.name: solver for solver in (HeavyBall, Adam, PreconditionedCG)}


@dataclass(frozen=True)
class Solution:
    """Factors after the inner loop, and the objective at its start and end (device scalars, not yet read).

    Of the quadratic model it has the loss and the gradient: the product would hold the activations.
    """

    factors: list[Factors]
    before: Tensor
    after: Tensor
    loss: Tensor
    gradient: Named


def solve(objective: Objective, inner: Inner, lr: float) -> Solution:
    """Minimise `J` over the factors of `U`, from the metric's current ones; does not change the metric itself."""
    metric, model = objective.metric, objective.quadratic
    if not metric.stored():  # the identity throughout
        value = objective.exact.at(metric.factors()).value
        return Solution(metric.factors(), value, value, model.loss, model.gradient)
    solver = SOLVERS[inner.solver](metric, inner, lr)
    values: dict[Step, Tensor] = {}
    for step in inner.plan():
        reading = perform(step, solver, objective)
        if reading is not None:
            values[step] = reading
    return Solution(solver.factors, values["first"], values["last"], model.loss, model.gradient)


def perform(step: Step, solver: Solver, objective: Objective) -> Tensor | None:
    """Do one step of a plan; returns the objective where the step reads it."""
    if step == "first":
        return solver.step(objective.exact)
    if step == "last":
        return solver.value(objective)
    solver.advance(objective, product=step == "product")
    return None

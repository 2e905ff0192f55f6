"""The settings of the inner loop."""

from __future__ import annotations

from dataclasses import dataclass

from llqr.curvature.divergence import Scale, check_scale
from llqr.schedule import Schedule, check
from llqr.solvers.plan import Step, plan
from llqr.solvers.registry import SOLVERS


@dataclass(frozen=True)
class Inner:
    """How a refresh minimises the objective `J(U)`.

    Attributes:
        solver: "heavy-ball" (the paper's) or "adam"; where the objective is quadratic in the factors, or in each of
            two sets of them (kfac, diag-kfac), also "line-search" (heavy ball with exact steps) and "cg"; for scalar
            and diagonal "pcg", which is preconditioned, starts from the best multiple and can be captured.
        steps: inner steps per refresh; one more product with H reads the objective at the end.
        lr: step size of heavy ball and adam, a number or a function of the optimizer step.
        momentum: of heavy ball and line search; zero at the start of every refresh.
        clip: bound on the norm of each factor's gradient (of each layer's for diagonal and scalar); cg has none.
        product_every: of heavy ball and adam: after the first two steps, only one inner step in so many makes a product
            with H; the others extrapolate H U g from earlier products, because H is linear.
        curvature_scale: "sum", "mean" or a number that multiplies the curvature of the mean loss (default: the
            divergence's; "sum" for ngd, where the curvature weighs the inner batch size times the linear term).
        gradients: average the objective over the gradients of so many equal shares of the inner batch, with one
            linearisation; one product with H per step and share. Exact engines compute the products of all shares in
            one batched pass, with the memory of all of them, unless `micro_batch` is set or several ranks learn.
        normalise: scale U so that g.Ug = g.g on average over the gradients of the inner batch, so that learning rates
            and radii keep their meaning.
        debias: give the t-th refresh the weight 1 / t until that falls below 1 - ema, so that the moving average does
            not remember the identity it starts from.

    Example:
        >>> Inner("cg", steps=10).solver
        'cg'
    """

    solver: str = "heavy-ball"
    steps: int = 50
    lr: Schedule = 1e-3
    momentum: float = 0.9
    clip: float = 5.0
    product_every: int = 1
    curvature_scale: Scale | None = None
    gradients: int = 1
    normalise: bool = False
    debias: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.solver, str) or self.solver not in SOLVERS:
            raise ValueError(f"solver: unknown {self.solver!r}; choose one of {', '.join(SOLVERS)}")
        check("lr", self.lr, 0)
        whole = {"steps": 1, "product_every": 1, "gradients": 1}
        for name, lower in (whole | {"momentum": 0, "clip": 0}).items():
            value = getattr(self, name)
            if not hasattr(value, "__index__" if name in whole else "__float__"):
                raise TypeError(f"{name}: expected a {'whole ' if name in whole else ''}number, got {value!r}")
            if not value >= lower:
                raise ValueError(f"{name}: expected a number >= {lower}, got {value!r}")
        for name in ("normalise", "debias"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: expected True or False, got {getattr(self, name)!r}")
        if self.product_every > 1 and not SOLVERS[self.solver].extrapolates:
            raise ValueError(f"product_every: not with solver={self.solver!r}, whose steps are made of their products")
        check_scale(self.curvature_scale)

    def plan(self) -> tuple[Step, ...]:
        """What each step of a refresh does; the last one only reads the objective."""
        return plan(self.steps, self.product_every)

    @property
    def products(self) -> int:
        """Products with `H` per refresh, without the one of a relative damping."""
        steps = [step for step in self.plan() if step is not Step.LAST or not SOLVERS[self.solver].tracks_residual]
        return self.gradients * sum(step.multiplies for step in steps)

"""The inner problem: the objective `J(U)`, and the solvers that minimise it over the factors of `U`.

In reading order: `inner` (the settings) and `plan` (what each step does); `objective`, with `damping` and
`extrapolation`; `solver` (what a solver offers); the solvers in `descent` (with `fused_descent`), `line_search` and
`preconditioned_cg`, listed in `registry`.
"""

from llqr.solvers.inner import Inner
from llqr.solvers.objective import Objective
from llqr.solvers.plan import Step
from llqr.solvers.registry import SOLVERS
from llqr.solvers.solver import Solver, SolverSettings

__all__ = ["SOLVERS", "Inner", "Objective", "Solver", "SolverSettings", "Step"]

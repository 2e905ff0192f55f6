"""The inner problem: `loop` has the settings and the loop, `objective` is `J(U)`, `solvers` minimise it."""

from llqr.inner.loop import Inner, Solution, Step, perform, solve
from llqr.inner.objective import Objective
from llqr.inner.solvers import SOLVERS, Solver

__all__ = ["SOLVERS", "Inner", "Objective", "Solution", "Solver", "Step", "perform", "solve"]

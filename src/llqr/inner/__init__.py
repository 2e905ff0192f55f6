"""The inner problem: `objective` is `J(U)`; `solvers` has the settings, the solvers that minimise it, and the loop."""

from llqr.inner.objective import Objective
from llqr.inner.solvers import SOLVERS, Inner, Solution, Solver, Step, perform, solve

__all__ = ["SOLVERS", "Inner", "Objective", "Solution", "Solver", "Step", "perform", "solve"]

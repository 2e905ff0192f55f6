"""The solvers by name. A new one is one more class in this table."""

from __future__ import annotations

from llqr.solvers.descent import Adam, HeavyBall
from llqr.solvers.line_search import ConjugateGradients, LineSearch
from llqr.solvers.preconditioned_cg import PreconditionedCG
from llqr.solvers.solver import Solver

SOLVERS: dict[str, type[Solver]] = {
    solver.name: solver for solver in (HeavyBall, Adam, LineSearch, ConjugateGradients, PreconditionedCG)
}

"""The inner loop as CUDA graphs, for networks whose refresh is bound by kernel launches.

One graph linearises at the parameters (in a spread refresh: at their copies), read in place. Every kind of step in the
plan is one more graph, on static factors and on the activations that the first graph saved. A refresh copies the batch
in, replays the first graph once and then the graph of each step, and reads the results at the end. The graphs have
their memory to themselves, so that anything may run on the device between two replays.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from llqr.cuda_graphs import Branches, capturing, warming_up
from llqr.curvature.batch import Batch, batch_signature, tensors_of
from llqr.curvature.quadratic import QuadraticModel
from llqr.refresh.inner_loop import InnerProblem, Solution, perform, solution_of
from llqr.schedule import at
from llqr.solvers import Step

Linearise = Callable[[Batch], QuadraticModel]


class CapturedLoop:
    """Captured for one shape of batch; `fits` says whether a batch can be replayed."""

    def __init__(self, problem: InnerProblem, linearise: Linearise, batch: Batch, step: int = 0) -> None:
        self.plan = problem.plan()
        self.done = 0
        self._problem = problem
        self._batch = pytree.tree_map_only(Tensor, torch.clone, batch)
        self._lr = self._rate(step)
        solver = problem.solver(self._lr)
        assert solver is not None
        self._solver = solver
        self._branches = Branches()
        kinds = list(dict.fromkeys(self.plan))
        self._warm_up(linearise, kinds)
        with capturing() as self._linearise:
            self._objective = problem.objective(linearise(self._batch), self._branches)
        self._graphs: dict[Step, torch.cuda.CUDAGraph] = {}
        self._values: dict[Step, Tensor] = {}
        # In the plan's order: what an engine makes at its first product only, and keeps, is made in the graph of the
        # first step, which is always replayed first.
        for kind in kinds:
            with capturing(self._linearise.pool()) as self._graphs[kind]:
                value = perform(kind, solver, self._objective)
            if value is not None:
                self._values[kind] = value

    def _rate(self, step: int) -> float | Tensor:
        """A tensor if it changes from refresh to refresh, so that the graphs need not be captured again."""
        inner = self._problem.inner
        if not callable(inner.lr):
            return float(inner.lr)
        device = self._problem.metric.blocks[0].device
        return torch.tensor(at(inner.lr, step, "lr", 0), dtype=torch.float32, device=device)

    def _warm_up(self, linearise: Linearise, kinds: list[Step]) -> None:
        """Library handles, workspaces and the solver's state are made outside the graphs."""
        with warming_up():
            for _ in range(2):
                objective = self._problem.objective(linearise(self._batch), self._branches)
                for kind in kinds:
                    perform(kind, self._solver, objective)

    @property
    def quadratic(self) -> QuadraticModel:
        return self._objective.quadratic

    def fits(self, batch: Batch) -> bool:
        return bool(batch_signature(batch) == batch_signature(self._batch))

    def begin(self, batch: Batch, step: int = 0) -> None:
        """Linearise on this batch. The tensors of the refresh before are overwritten."""
        for static, given in zip(tensors_of(self._batch), tensors_of(batch), strict=True):
            static.copy_(given)
        for static_factors, factors in zip(self._solver.factors, self._problem.metric.factors(), strict=True):
            for name, factor in factors.items():
                static_factors[name].copy_(factor)
        if isinstance(self._lr, Tensor):
            self._lr.fill_(at(self._problem.inner.lr, step, "lr", 0))
        self._solver.restart()
        self.done = 0
        self._linearise.replay()

    def advance(self) -> None:
        self._graphs[self.plan[self.done]].replay()
        self.done += 1

    def solution(self) -> Solution:
        """What was learned, when all steps are done; the next refresh overwrites it."""
        return solution_of(self._solver, self._objective, self._values)

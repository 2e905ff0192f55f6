"""Products through FSDP's own passes: of models whose whole weights are too large for one device.

`J v` is a difference between the outputs of two forward passes, for which the shards move along `v`. `J^T u` is a
backward pass through one kept graph, in which FSDP adds up the parts of all ranks. All ranks must call everything here
together, because FSDP communicates in every pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from llqr.curvature.batch import Batch
from llqr.curvature.curvature import Curvature
from llqr.curvature.derivatives import FiniteDifferences, Function, UnconnectedError
from llqr.curvature.engine import Engine
from llqr.curvature.losses import Loss
from llqr.curvature.problem import Forward, Problem
from llqr.curvature.quadratic import Named, QuadraticModel
from llqr.distributed.collectives import all_reduce
from llqr.distributed.dtensors import Sharding, drop_gathered, local


class ShardedProblem(Problem):
    """A problem whose parameters are this rank's shards. Its terms are those of all ranks together.

    Args:
        sharded: the model's own parameters, of which `parameters` are copies.
        group: the ranks that train the model.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Loss,
        batch: Batch,
        sharded: Mapping[str, Tensor],
        group: dist.ProcessGroup,
        *,
        forward: Forward | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__(model, loss_fn, batch, sharded, forward=forward, autocast=autocast)
        self._model, self._sharded, self._group = model, sharded, group
        self._computes_in = _examined(model)
        self._weight: Tensor | None = None

    @property
    def compiled(self) -> bool:
        """Whether parts of the model are compiled, in place or not."""
        return any(module._compiled_call_impl or hasattr(module, "_orig_mod") for module in self._model.modules())

    def taken(self, parameter: Tensor) -> Tensor:
        return local([parameter])[0].clone()

    @property
    def precision(self) -> torch.dtype:
        return max(self._computes_in | {super().precision}, key=lambda dtype: torch.finfo(dtype).eps)

    def outputs(self, parameters: Mapping[str, Tensor], inputs: Any, *, plain: bool = True) -> Tensor:
        """The outputs at these shards, which are left there: see `return_`."""
        self._move(parameters)
        buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        try:
            return self.called(inputs)
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)

    def return_(self) -> None:
        """The model's shards are where they were."""
        self._move(self.parameters)

    @torch.no_grad()
    def _move(self, parameters: Mapping[str, Tensor]) -> None:
        drop_gathered(self._model.modules())
        torch._foreach_copy_(local(list(self._sharded.values())), [parameters[name] for name in self._sharded])

    def terms(self, outputs: Tensor) -> Tensor:
        own = super().terms(outputs)
        total = self.total(own)
        self._weight = own / total
        return total

    def total(self, number: Tensor) -> Tensor:
        """The sum over all ranks."""
        number = number.detach().clone()
        all_reduce(number, self._group)
        return number

    def weighed(self, number: Tensor) -> Tensor:
        """A rank's share of a mean over the terms of all ranks."""
        assert self._weight is not None, "terms come first"
        return number * self._weight.to(number)

    def pulled(self, outputs: Tensor, u: Tensor, retain_graph: bool) -> Named:
        """This rank's shards of the sum over all ranks of `J^T u`, each weighed by its terms."""
        parameters = list(self._sharded.values())
        before = [parameter.grad for parameter in parameters]
        try:
            for parameter in parameters:
                parameter.grad = None
            # FSDP averages over the ranks.
            outputs.backward(self.weighed(u) * dist.get_world_size(self._group), retain_graph=retain_graph)
            found = {name: parameter.grad for name, parameter in self._sharded.items()}
        finally:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
        if all(gradient is None for gradient in found.values()):
            raise UnconnectedError(found)
        return {
            name: torch.zeros_like(self.parameters[name]) if gradient is None else local([gradient])[0]
            for name, gradient in found.items()
        }

    def size(self, v: Mapping[str, Tensor]) -> Tensor:
        """`|v|` over all shards."""
        squares = Sharding(list(self._sharded.values())).sums(
            lambda parts: torch.stack([part.double() for part in torch._foreach_norm(parts)]).square().sum(),
            [v[name] for name in self._sharded],
        )
        return torch.stack(squares).sum().sqrt()


class Passes(FiniteDifferences):
    """Central differences of FSDP's forward passes, and its backward passes."""

    def __init__(
        self,
        problem: ShardedProblem,
        f: Function,
        theta: Mapping[str, Tensor],
        precision: torch.dtype,
        given_away: bool = False,
    ) -> None:
        self._problem = problem
        super().__init__(f, theta, precision, given_away)

    def _gradient(self, outputs: Tensor, u: Tensor, create_graph: bool = False, retain_graph: bool = True) -> Named:
        return self._problem.pulled(outputs, u, retain_graph)

    def jvp(self, v: Mapping[str, Tensor]) -> Tensor:
        try:
            return super().jvp(v)
        finally:
            self._problem.return_()

    def second(self, w: Tensor) -> Callable[[Mapping[str, Tensor]], Named]:
        product = super().second(w)

        def returning(v: Mapping[str, Tensor]) -> Named:
            try:
                return product(v)
            finally:
                self._problem.return_()

        return returning

    def _vjp_at(self, theta: Named, w: Tensor) -> Named:
        with torch.enable_grad():
            outputs = self.f(theta)
        return self._problem.pulled(outputs, w, retain_graph=False)

    def _step(self, v: Mapping[str, Tensor]) -> Tensor:
        """As in `FiniteDifferences`; in float64, where `h v` is tiny beside any curvature, rounding decides."""
        wide = self.precision == torch.float64
        width = torch.finfo(self.precision).eps ** (1 / 3 if wide else 1 / 2)
        step: Tensor = width / self._problem.size(v).clamp_min(torch.finfo(torch.float32).tiny ** 0.5)
        return step


class PassesEngine(Engine):
    """Quadratic models of all ranks' batches together, whose vectors are this rank's shards."""

    name = "passes"
    first_order, exact, micro_batches, of_shards = True, False, False, True

    def linearise(self, problem: Problem) -> QuadraticModel:
        assert isinstance(problem, ShardedProblem)

        # Not tried out, as other engines do: FSDP does not recover from a backward pass that fails halfway.
        given_away = problem.compiled
        derivatives = partial(Passes, problem)
        curvature = Curvature(problem, self.divergence, derivatives, self.scale, given_away=given_away)
        model = curvature.model(self.gradients)
        return replace(model, loss=problem.total(problem.weighed(model.loss)))


def _examined(model: nn.Module) -> set[torch.dtype]:
    """What FSDP's policies let modules compute in. Refuses gradients that are not averages over the ranks."""
    from torch.distributed.fsdp import FSDPModule

    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    for state in states:
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        if any(getattr(group, "gradient_divide_factor", None) is not None for group in groups):
            raise ValueError("engine: 'passes' needs FSDP's own averages, without set_gradient_divide_factor()")
    return {state._mp_policy.param_dtype for state in states if state._mp_policy.param_dtype is not None}

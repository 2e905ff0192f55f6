"""Quadratic models of several ranks as one: that of the joined batch, so that every rank learns the same metric.

The mean loss of the joined batch weighs every rank by the number of terms of its own mean. A rank that fails must not
leave the others waiting: if it cannot linearise, all ranks raise; if a product fails, its part of that product and of
all later ones is NaN, and the guards of all ranks reject the refresh.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from llqr.curvature.quadratic import Named, QuadraticModel

T = TypeVar("T")


class RankError(RuntimeError):
    """Another rank failed in a refresh."""


@dataclass(frozen=True)
class Ranks:
    """The ranks that learn one metric together.

    Attributes:
        group: of `torch.distributed`.
        summed: whether the curvature is a sum over the batch, and so over the ranks.
    """

    group: dist.ProcessGroup
    summed: bool = False

    @property
    def several(self) -> bool:
        return dist.get_world_size(self.group) > 1

    def __deepcopy__(self, memo: dict[int, object]) -> Ranks:
        """A process group cannot be copied, and need not be."""
        return self

    def joined(self, linearise: Callable[[], QuadraticModel], device: torch.device) -> QuadraticModel:
        """The quadratic model of the joined batch, from every rank's own."""
        local = self.all_or_none(linearise, device)
        local = replace(local, product=_failing_for_good(local.product))
        terms = torch.ones((), device=device) if local.terms is None else local.terms
        weight = terms.double() / self._total({"terms": terms.double()})["terms"]

        def weighed(named: Named) -> Named:
            return {name: part * weight.to(part) for name, part in named.items()}

        def product(v: Mapping[str, Tensor]) -> Named:
            try:
                own = local.product(v)
            except Exception as error:  # whatever it is, the other ranks are waiting
                warnings.warn(f"refresh: a product failed on this rank ({error}); no rank uses it", stacklevel=2)
                own = {name: torch.full_like(part, torch.nan) for name, part in v.items()}
            return self._total(own if self.summed else weighed(own))

        loss = self._total(weighed({"loss": local.loss}))["loss"]
        gradients = tuple(self._total(weighed(share)) for share in local.gradients)
        return QuadraticModel(loss, self._total(weighed(local.gradient)), product, gradients, terms)

    def largest(self, number: int, device: torch.device) -> int:
        """The largest of the ranks' numbers."""
        agreed = torch.tensor(number, device=device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self.group)
        return int(agreed)

    def all_or_none(self, action: Callable[[], T], device: torch.device) -> T:
        """What `action` returns, if it succeeds on all ranks; otherwise an error on all of them."""
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return action()  # it worked on all ranks when it was warmed up
        results: list[T] = []
        failure: Exception | None = None
        try:
            results.append(action())
        except Exception as error:
            failure = error
        singular = isinstance(failure, torch.linalg.LinAlgError)  # type: ignore[attr-defined]
        worst = self.largest(0 if failure is None else 1 if singular else 2, device)
        if failure is not None:
            raise failure
        if worst == 1:
            raise torch.linalg.LinAlgError("on another rank")  # type: ignore[attr-defined]
        if worst == 2:
            raise RankError("refresh: another rank failed, see its error")
        return results[0]

    def _total(self, local: Named) -> Named:
        """The sum over the ranks, in one collective per dtype."""
        total: Named = {}
        for dtype in dict.fromkeys(part.dtype for part in local.values()):
            own = {name: part for name, part in local.items() if part.dtype == dtype}
            flat = torch.cat([part.reshape(-1) for part in own.values()])
            dist.all_reduce(flat, group=self.group)
            parts = flat.split([part.numel() for part in own.values()])
            total |= {name: part.view_as(own[name]) for name, part in zip(own, parts, strict=True)}
        return {name: total[name] for name in local}


def _failing_for_good(product: Callable[[Mapping[str, Tensor]], Named]) -> Callable[[Mapping[str, Tensor]], Named]:
    """A product that fails again once it has failed: an inner step alone leaves out what is NaN."""
    failures: list[Exception] = []

    def guarded(v: Mapping[str, Tensor]) -> Named:
        if failures:
            raise failures[0]
        try:
            return product(v)
        except Exception as error:
            failures.append(error)
            raise

    return guarded

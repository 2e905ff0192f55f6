"""One quadratic model of several ranks, that of their joined batch: every rank learns the same metric.

The mean loss of the joined batch weighs every rank by the number of terms of its own mean. A rank that fails must not
leave the others waiting: if it cannot linearise, all ranks raise; if a product fails, its part of that product and of
all later ones is NaN, and the guards of all ranks reject the refresh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from llqr.caller_warnings import warn
from llqr.curvature.quadratic import Named, QuadraticModel
from llqr.distributed.collectives import all_reduce

if TYPE_CHECKING:
    from llqr.distributed.placement import Owned

T = TypeVar("T")


class RankError(RuntimeError):
    """Another rank failed in a refresh."""


@dataclass(frozen=True)
class Ranks:
    """The ranks that learn one metric together, or one process alone.

    Attributes:
        group: of `torch.distributed`; None if no others are known.
        summed: whether the curvature is a sum over the batch, and so over the ranks.
        placement: of a metric that is shared out; the vectors of the joined model are then those of a rank's own part.
    """

    group: dist.ProcessGroup | None
    summed: bool = False
    placement: Owned | None = None

    @property
    def alone(self) -> bool:
        return self.group is None or (dist.get_world_size(self.group) == 1 and self.placement is None)

    @property
    def place(self) -> list[int]:
        """This process's place among the ranks, and how many there are."""
        return [0, 1] if self.alone else [dist.get_rank(self.group), dist.get_world_size(self.group)]

    def __deepcopy__(self, memo: dict[int, object]) -> Ranks:
        """A process group cannot be copied, and need not be."""
        return self

    def joined(self, linearise: Callable[[], QuadraticModel], device: torch.device) -> QuadraticModel:
        """The quadratic model of the joined batch, from every rank's own."""
        if self.alone:
            return linearise()
        local = self.all_or_none(linearise, device)
        terms = torch.ones((), device=device) if local.terms is None else local.terms
        weight = terms.double() / self._sum(terms.double())
        multiply, curvature_weight = local.product, None if self.summed else weight
        some = terms > 0

        def counted(named: Named) -> Named:
            """Zero on a rank without terms, whose mean is 0 / 0."""
            return {name: torch.where(some.to(part.device), part, 0) for name, part in named.items()}

        failed = False  # stays True once it is: a single NaN product would only be left out by its inner step

        def product(v: Mapping[str, Tensor]) -> Named:
            nonlocal failed
            whole = v if self.placement is None else self.placement.to_whole(v)
            own: Named | None = None
            try:
                own = None if failed else counted(multiply(whole))
            except Exception as error:  # whatever it is, the other ranks are waiting
                failed = True
                warn(f"refresh: a product failed on this rank ({error}); no rank uses it")
            if own is None:
                own = {name: torch.full_like(part, torch.nan) for name, part in whole.items()}
            del whole
            return self._mean(own, curvature_weight)

        loss = self._sum(torch.where(some, local.loss, 0) * weight.to(local.loss))
        return QuadraticModel(loss, self._mean(counted(local.gradient), weight), product, terms)

    def largest(self, number: int, device: torch.device) -> int:
        """The largest of the ranks' numbers."""
        if self.alone:
            return number
        assert self.group is not None
        agreed = torch.tensor(number, device=device)
        all_reduce(agreed, self.group, largest=True)
        return int(agreed)

    def all_or_none(self, action: Callable[[], T], device: torch.device) -> T:
        """What `action` returns, if it succeeds on all ranks; otherwise an error on all of them."""
        if self.alone or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return action()  # it worked on all ranks when it was warmed up
        try:
            result = action()
        except Exception as error:
            singular = isinstance(error, torch.linalg.LinAlgError)  # type: ignore[attr-defined]
            self.largest(1 if singular else 2, device)
            raise
        worst = self.largest(0, device)
        if worst == 1:
            raise torch.linalg.LinAlgError("on another rank")  # type: ignore[attr-defined]
        if worst == 2:
            raise RankError("refresh: another rank failed, see its error")
        return result

    def _sum(self, number: Tensor) -> Tensor:
        assert self.group is not None
        total = number.clone()
        all_reduce(total, self.group)
        return total

    def _mean(self, named: Named, weight: Tensor | None) -> Named:
        """The sum over all ranks of their own `weight * named`, in one collective per dtype."""
        if self.placement is not None:
            return self.placement.mean(named, weight)
        assert self.group is not None
        total: Named = {}
        for dtype in dict.fromkeys(part.dtype for part in named.values()):
            own = {name: part for name, part in named.items() if part.dtype == dtype}
            flat = torch.cat([part.reshape(-1) for part in own.values()])
            if weight is not None:
                flat.mul_(weight.to(flat))
            all_reduce(flat, self.group)
            parts = flat.split([part.numel() for part in own.values()])
            total |= {name: part.view_as(own[name]) for name, part in zip(own, parts, strict=True)}
        return {name: total[name] for name in named}

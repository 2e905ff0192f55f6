"""LookSAM: the steps between two probes reuse what the last probe added to the gradient."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from llqr.probes.norms import Norm
from llqr.probes.sam import Point, SAMProbe
from llqr.schedule import Schedule, check_number


class LookSAMProbe(SAMProbe):
    """LookSAM: `v` is the part of `U g~` orthogonal to `eps`; steps between probes take `U g + alpha |U g| v / |v|`.

    Example:
        >>> probe = LookSAMProbe(rho=1.0, alpha=1.0, every=2)
        >>> probe.reused([torch.tensor([1.0, 0.0])], [torch.tensor([3.0, 4.0])])
        [tensor([3., 4.])]
        >>> probe.reused(None, [torch.tensor([2.0, 0.0])])
        [tensor([2., 2.])]
    """

    name = "looksam"

    def __init__(
        self,
        rho: Schedule = 0.05,
        *,
        alpha: float = 0.7,
        norm: Norm = "euclidean",
        start_after: int = 0,
        every: Schedule = 5,
    ) -> None:
        super().__init__(rho, norm=norm, start_after=start_after, every=every)
        self.alpha = check_number("alpha", alpha, 0)
        self._v: list[Tensor] = []

    def filtered(self, point: Point) -> list[Tensor]:
        point.overwrite = False
        return point.grads

    def reused(self, eps: list[Tensor] | None, Ug: list[Tensor]) -> list[Tensor]:
        if eps is not None:
            along = torch._foreach_mul(eps, _dot(eps, Ug) / _dot(eps, eps))
            v = torch._foreach_sub(Ug, along)
            self._v = list(torch._foreach_mul(v, _dot(v, v).rsqrt()))
            return Ug
        if len(self._v) != len(Ug):
            return Ug
        return list(torch._foreach_add(Ug, torch._foreach_mul(self._v, self.alpha * _dot(Ug, Ug).sqrt())))

    def state_dict(self, order: Sequence[Tensor]) -> dict[str, Any]:
        return {"v": self._v}

    def load_state_dict(self, state: Mapping[str, Any], order: Sequence[Tensor]) -> None:
        self._v = list(state["v"])


def _dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    return torch.stack([part.sum() for part in torch._foreach_mul(list(a), list(b))]).sum()

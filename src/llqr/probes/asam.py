"""ASAM: the probe in coordinates scaled by the size of each weight."""

import torch
from torch import Tensor

from llqr.probes.norms import Norm
from llqr.probes.sam import Point, Radius, SAMProbe, widened
from llqr.schedule import Schedule, check_number


class ASAMProbe(SAMProbe):
    """ASAM: `T = |w| + eta` (1 for biases), `eps = rho T^2 g / |T g|`.

    Example (a weight of 0 hardly moves):
        >>> weight = torch.tensor([0.0, 1.0])
        >>> point = Point([weight], [torch.ones(2)], names={weight: "weight"})
        >>> ASAMProbe(rho=1.0, eta=0.0).displacement(point, lambda v: v, step=0)[0]
        tensor([0., 1.])
    """

    name = "asam"

    def __init__(
        self, rho: Radius = None, *, eta: float = 0.01, norm: Norm = "metric", start_after: int = 0, every: Schedule = 1
    ) -> None:
        super().__init__(rho, norm=norm, start_after=start_after, every=every)
        self.eta = check_number("eta", eta, 0)

    def scaling(self, point: Point) -> list[Tensor]:
        scaling = list(torch._foreach_abs(widened(point.weights)))
        torch._foreach_mul_(scaling, [0.0 if bias else 1.0 for bias in point.is_bias])
        torch._foreach_add_(scaling, [1.0 if bias else self.eta for bias in point.is_bias])
        return scaling

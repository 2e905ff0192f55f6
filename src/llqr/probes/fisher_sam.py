"""FisherSAM: the probe in the diagonal Fisher metric of one minibatch."""

import torch
from torch import Tensor

from llqr.probes.norms import Norm
from llqr.probes.sam import Point, Radius, SAMProbe, widened
from llqr.schedule import Schedule, check_number


class FisherSAMProbe(SAMProbe):
    """FisherSAM: `F^-1 = 1 / (g^2 + eta)`, `eps = rho F^-1 g / sqrt(g.F^-1 g)`; the update does not change.

    Example:
        >>> point = Point([torch.zeros(1)], [torch.ones(1)])
        >>> FisherSAMProbe(rho=1.0, eta=3.0).displacement(point, lambda v: v, step=0)[0]
        tensor([0.5000])
    """

    name = "fishersam"

    def __init__(
        self, rho: Radius = None, *, eta: float = 0.1, norm: Norm = "metric", start_after: int = 0, every: Schedule = 1
    ) -> None:
        super().__init__(rho, norm=norm, start_after=start_after, every=every)
        self.eta = check_number("eta", eta, 1e-12)

    def scaling(self, point: Point) -> list[Tensor]:
        grads = widened(point.grads)
        scaling = list(torch._foreach_mul(grads, grads))
        torch._foreach_add_(scaling, self.eta)
        torch._foreach_rsqrt_(scaling)
        return scaling

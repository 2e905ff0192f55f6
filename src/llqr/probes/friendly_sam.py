"""F-SAM: the probe along the part of the gradient that is specific to the minibatch."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from llqr.distributed.dtensors import as_sharded, local_like
from llqr.probes.norms import Norm
from llqr.probes.sam import Point, Radius, SAMProbe
from llqr.schedule import Schedule, check_number


class FriendlySAMProbe(SAMProbe):
    """F-SAM: `v = g - gbar`, then `gbar <- lam gbar + (1 - lam) g`, with `gbar` starting at 0.

    With `every`, `gbar` averages the gradients of the steps that probe.

    Example (the second probe subtracts what the two batches have in common):
        >>> probe, weight = FriendlySAMProbe(rho=1.0, lam=0.0), torch.zeros(2)
        >>> for gradient in ([3.0, 0.0], [3.0, 4.0]):
        ...     point = Point([weight], [torch.tensor(gradient)])
        ...     print(probe.displacement(point, lambda v: v, step=0)[0])
        tensor([1., 0.])
        tensor([0., 1.])
    """

    name = "fsam"

    def __init__(
        self, rho: Radius = None, lam: float = 0.9, *, norm: Norm = "metric", start_after: int = 0, every: Schedule = 1
    ) -> None:
        super().__init__(rho, norm=norm, start_after=start_after, every=every)
        self.lam = check_number("lam", lam, 0, 1)
        self._mean: dict[Tensor, Tensor] = {}  # of sharded parameters this rank's parts
        self._before: dict[Tensor, Tensor] | None = None  # until the step is done

    def filtered(self, point: Point) -> list[Tensor]:
        means = [self._mean_of(parameter, g) for parameter, g in zip(point.parameters, point.grads, strict=True)]
        v = list(torch._foreach_sub(point.grads, means))
        moved = torch._foreach_lerp(means, point.grads, 1 - self.lam)
        self._before = self._mean
        self._mean = self._mean | dict(zip(point.parameters, moved, strict=True))
        return v

    def _mean_of(self, parameter: Tensor, g: Tensor) -> Tensor:
        """In the gradient's device and dtype; a parameter whose shape has changed starts again at 0."""
        mean = self._mean.get(parameter)
        return torch.zeros_like(g) if mean is None or mean.shape != g.shape else mean.to(g.device, g.dtype)

    def settle(self) -> None:
        self._before = None

    def undo(self) -> None:
        if self._before is not None:
            self._mean, self._before = self._before, None

    def state_dict(self, order: Sequence[Tensor]) -> dict[str, Any]:
        mean = self._mean if self._before is None else self._before  # without a step that is not done
        return {"mean": {i: as_sharded(mean[p], p) for i, p in enumerate(order) if p in mean}}

    def load_state_dict(self, state: Mapping[str, Any], order: Sequence[Tensor]) -> None:
        means: dict[Tensor, Tensor] = {}
        for i, mean in state["mean"].items():
            parameter = order[int(i)]
            if mean.shape != parameter.shape:
                raise ValueError(
                    f"state_dict: the F-SAM mean of parameter {i} has shape {tuple(mean.shape)}, "
                    f"expected {tuple(parameter.shape)}"
                )
            means[parameter] = local_like(mean.detach().to(parameter.device), parameter).clone()
        self._mean, self._before = means, None

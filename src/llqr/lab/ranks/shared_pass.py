"""A rank's share of a batch, and the pass over it, whose mean over the ranks is the pass over the whole batch."""

import torch
from torch import Tensor, nn

from llqr.curvature.problem import counted_terms, samples_in, taken_rows
from llqr.lab.errors import ConfigurationError
from llqr.lab.passes.captured_pass import Pass
from llqr.lab.passes.precision import Precision
from llqr.lab.ranks.team import Team
from llqr.lab.tasks import Batch, Task


def share(batch: Batch, team: Team) -> Batch:
    """Every so many-th sample: shares differ by at most one sample, and padding at the end of a batch is spread."""
    samples = samples_in(batch) or 0
    if samples < team.size:
        raise ConfigurationError(
            f"--strategy: a batch of {samples} samples cannot be shared out among {team.size} ranks; start fewer "
            "processes, or choose larger batches (and training.last)."
        )
    return taken_rows(batch, slice(team.rank, None, team.size))


class SharedPass(Pass):
    """Loss and gradients of this rank's share of the batch that was loaded last.

    The loss of a share is weighted by the number of terms that its mean is taken over, so that the mean of the ranks is
    that of the whole batch, also where shares or the padding in them differ.
    """

    def __init__(self, task: Task, model: nn.Module, precision: Precision, team: Team) -> None:
        super().__init__(task, model, precision)
        self._team = team
        self._weight: Tensor | float = 1.0

    def load(self, batch: Batch) -> None:
        own = share(batch, self._team)
        super().load(own)
        self._weight = self._team.size * self._terms(own) / self._terms(batch)

    def _terms(self, batch: Batch) -> Tensor | float:
        counted = counted_terms(self._task.loss, batch[1])
        return float(samples_in(batch) or 0) if counted is None else counted.double()

    def _weighted(self, loss: Tensor) -> Tensor:
        weight = torch.as_tensor(self._weight, device=loss.device).to(loss.dtype)
        # A share that is all padding has no loss of its own: a mean over nothing.
        return torch.where(weight > 0, loss * weight, torch.zeros_like(loss))

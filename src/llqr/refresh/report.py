"""What a refresh reports: what happened, a warning, or an error."""

from __future__ import annotations

from dataclasses import dataclass


class RefreshError(RuntimeError):
    """Too many refreshes in a row were rejected."""


class RefreshWarning(UserWarning):
    """A refresh was rejected, or computed with an approximate engine."""


@dataclass(frozen=True)
class Refresh:
    """What happened in one refresh; `reason` says why the old metric was kept, and is empty when it was not.

    Attributes:
        step: where it began.
        objective_before, objective_after: `J` at the start and at the end of the inner loop.
        loss, gradient_norm: on the inner batch.
        change: `|Ug - g| / |g|` on the inner gradient, for the metric that the refresh leads to.
        cosine: of the angle between `g` and `Ug`.
        seconds: what the host spent on it, in one step or spread over many.

    Example:
        >>> import llqr, torch
        >>> geometry = llqr.Geometry(torch.nn.Linear(4, 3), torch.nn.functional.cross_entropy)
        >>> report = geometry.refresh((torch.randn(8, 4), torch.randint(3, (8,))))
        >>> report.accepted, report.reason, report.objective_after < report.objective_before
        (True, '', True)
    """

    step: int
    accepted: bool
    reason: str
    objective_before: float
    objective_after: float
    loss: float
    gradient_norm: float
    change: float
    cosine: float
    engine: str
    seconds: float

"""The weight of `1/2 |delta|^2` in the objective: a number, or a share of the curvature."""

from __future__ import annotations

import re
from dataclasses import dataclass

from llqr.schedule import plain

_SHARE = re.compile(r"\s*(\d+(?:\.\d*)?)\s*%\s*")


@dataclass(frozen=True)
class Damping:
    """`lambda`, or with `relative` the share `lambda = value (g.Hg) / (g.g)`, which costs one more product per refresh.

    Example:
        >>> Damping.of(0.1), Damping.of("10%")
        (Damping(value=0.1, relative=False), Damping(value=0.1, relative=True))
    """

    value: float = 0.0
    relative: bool = False

    @classmethod
    def of(cls, damping: float | str) -> Damping:
        """From what a user writes: `0.1`, or `"10%"` of the curvature along the gradient."""
        if isinstance(damping, str):
            share = _SHARE.fullmatch(damping)
            if share is not None:
                return cls(float(share[1]) / 100, relative=True)
        elif (value := plain(damping)) is not None and value >= 0:
            return cls(float(value))
        raise ValueError(f"damping: expected a number >= 0, or a share of the curvature such as '10%', got {damping!r}")

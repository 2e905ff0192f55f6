"""The structures by name. A new one is one more class in this table."""

from __future__ import annotations

from .dense import Dense
from .diag_kfac import DiagKFAC
from .diagonal import Diagonal
from .ekfac import EKFAC, PositiveEKFAC
from .kfac import KFAC, PositiveKFAC
from .scalar import Scalar
from .structure import Structure

STRUCTURES: dict[str, type[Structure]] = {
    kind.name: kind for kind in (Scalar, Diagonal, KFAC, PositiveKFAC, EKFAC, PositiveEKFAC, DiagKFAC, Dense)
}

#: No factors at all: the block of `U` stays the identity.
IDENTITY = "identity"

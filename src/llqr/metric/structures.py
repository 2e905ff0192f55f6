"""The structures by name. A new one is one more class in this table."""

from __future__ import annotations

from .dense import Dense
from .diag_kfac import DiagKFAC
from .diagonal import Diagonal
from .ekfac import EKFAC, PositiveEKFAC
from .identity import Identity
from .kfac import KFAC, PositiveKFAC
from .scalar import Scalar
from .structure import Structure

STRUCTURES: dict[str, type[Structure]] = {
    kind.name: kind for kind in (Identity, Scalar, Diagonal, KFAC, PositiveKFAC, EKFAC, PositiveEKFAC, DiagKFAC, Dense)
}

"""The structures by name. A new one is one more class in this table."""

from __future__ import annotations

from llqr.metric.channel_ekfac import ChannelEKFAC
from llqr.metric.dense import Dense
from llqr.metric.diag_kfac import DiagKFAC
from llqr.metric.diagonal import Diagonal
from llqr.metric.ekfac import EKFAC, PositiveEKFAC
from llqr.metric.identity import Identity
from llqr.metric.kfac import KFAC, PositiveKFAC
from llqr.metric.one_sided_ekfac import OneSidedEKFAC
from llqr.metric.scalar import Scalar
from llqr.metric.structure import Structure

STRUCTURES: dict[str, type[Structure]] = {
    structure.name: structure
    for structure in (
        Identity,
        Scalar,
        Diagonal,
        KFAC,
        PositiveKFAC,
        EKFAC,
        PositiveEKFAC,
        OneSidedEKFAC,
        ChannelEKFAC,
        DiagKFAC,
        Dense,
    )
}

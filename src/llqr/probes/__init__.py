"""The probes: a gradient (and a metric) in, a displacement of the weights out."""

from llqr.probes.asam import ASAMProbe
from llqr.probes.fisher_sam import FisherSAMProbe
from llqr.probes.friendly_sam import FriendlySAMProbe
from llqr.probes.norms import NORMS, Norm
from llqr.probes.sam import Point, SAMProbe

__all__ = ["NORMS", "PROBES", "ASAMProbe", "FisherSAMProbe", "FriendlySAMProbe", "Norm", "Point", "SAMProbe"]

#: The probes by name. A new one is one more class in this table.
PROBES: dict[str, type[SAMProbe]] = {
    probe.name: probe for probe in (SAMProbe, ASAMProbe, FisherSAMProbe, FriendlySAMProbe)
}

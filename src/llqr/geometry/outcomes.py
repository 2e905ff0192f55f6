"""How the refreshes of a geometry went: counts, what `U` does to a gradient, and when to warn or give up."""

from __future__ import annotations

from collections.abc import Mapping

from llqr.caller_warnings import warn
from llqr.geometry.summary import summarise, weak_metric
from llqr.metric import Metric
from llqr.refresh.effect import WEAK, Effect
from llqr.refresh.guards import Findings
from llqr.refresh.progress import Progress
from llqr.refresh.report import Refresh, RefreshError, RefreshWarning

#: A warning comes after so many refreshes in a row that change a gradient by less than one per cent.
WEAK_REFRESHES = 3
NO_MINIMUM = (
    "loss_fn: the curvature along -Ug is negative, so that the objective has no minimum and U grows from refresh to "
    "refresh; a loss that is not convex in the outputs is a reason (let forward= return what a convex one takes, such "
    "as similarities for a cross-entropy), divergence='newton' another; bounds= limits U (said once)"
)
COUNTERS = ("refreshes", "failures", "failures_in_a_row")


class Outcomes:
    """Counts refreshes and keeps the effect of the last accepted one.

    Args:
        metric: what is learned.
        max_failures: rejected refreshes in a row before an error.
    """

    def __init__(self, metric: Metric, max_failures: int) -> None:
        self.refreshes = 0
        self.failures = 0
        self.failures_in_a_row = 0
        self._weak_in_a_row = 0
        self._warned_of_growth = False
        self._metric, self._max_failures = metric, max_failures
        self._identity = 1.0  # the share of the identity in the moving average
        self._effect: Effect | None = None
        self.layers: Mapping[str, Effect] = {}

    @property
    def accepted(self) -> int:
        return self.refreshes - self.failures

    def report(self, progress: Progress, found: Findings, reason: str, engine: str, beta: float) -> Refresh:
        """Count a refresh that is done; accepted without a `reason`, it kept the share `beta` of the old metric."""
        self.refreshes += 1
        if reason:
            self.failures += 1
            self.failures_in_a_row += 1
        else:
            self.failures_in_a_row = 0
            self._effect, self.layers = found.effect, found.layers
            self._identity *= beta
        return Refresh(
            step=progress.step,
            accepted=not reason,
            reason=reason,
            objective_before=found.before,
            objective_after=found.after,
            loss=found.loss,
            gradient_norm=found.gradient_norm,
            change=found.effect.change,
            cosine=found.effect.cosine,
            engine=engine,
            seconds=progress.seconds,
        )

    def judge(self, report: Refresh, found: Findings) -> None:
        """Warn of a rejected refresh, or of a metric that only grows or does nearly nothing; raise after too many
        rejected ones."""
        if not report.accepted:
            self._complain(report)
        elif self._metric.stored():
            if found.bottomless and not self._warned_of_growth:
                self._warned_of_growth = True
                warn(NO_MINIMUM, RefreshWarning)
            self._weak_in_a_row = self._weak_in_a_row + 1 if report.change < WEAK else 0
            if self._weak_in_a_row == WEAK_REFRESHES:
                warn(weak_metric(report.change, self._structures()), RefreshWarning)

    def _complain(self, report: Refresh) -> None:
        message = f"refresh at step {report.step}: kept the old metric, because {report.reason}"
        if self.failures == 1:
            warn(message + " (said once; see Geometry.failures)", RefreshWarning)
        if self.failures_in_a_row >= self._max_failures:
            raise RefreshError(f"{message}; {self.failures_in_a_row} in a row (max_failures={self._max_failures})")

    def summary(self) -> str:
        if self._effect is None and self._metric.learned:
            return "U was learned before its state was loaded; what it does is measured at the next refresh."
        return summarise(self._effect, self.layers, self._structures(), self.accepted, self._identity)

    def _structures(self) -> set[str]:
        """Of the matrices, or of everything in a network without any."""
        whole = self._metric.whole
        matrices = {whole.kinds[block.name] for block in whole.blocks if block.is_matrix}
        return matrices or set(whole.kinds.values())

    def state(self) -> dict[str, float]:
        return {key: getattr(self, key) for key in COUNTERS} | {"identity": self._identity}

    def load(self, state: Mapping[str, float]) -> None:
        """What `U` does to a gradient is measured again at the next refresh."""
        for key in COUNTERS:
            setattr(self, key, int(state[key]))
        self._identity = float(state.get("identity", 0.0))  # older states do not say
        self._effect, self.layers, self._weak_in_a_row = None, {}, 0

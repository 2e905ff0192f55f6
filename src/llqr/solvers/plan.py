"""What each step of the inner loop does: one plan that the eager and the captured loop both follow."""

from __future__ import annotations

from enum import Enum


class Step(Enum):
    """One step of the inner loop.

    The objectives at the start and at the end are compared, and may differ by less than a lower precision rounds away:
    `FIRST` and `LAST` therefore run in the factors' own precision, whatever the steps between them run in.
    """

    #: Read the objective at the start, and move.
    FIRST = "first"
    #: Move, with a product with `H`.
    PRODUCT = "product"
    #: Move, with `H v` extrapolated from earlier products.
    EXTRAPOLATE = "extrapolate"
    #: Read the objective at the end; nothing moves.
    LAST = "last"

    @property
    def multiplies(self) -> bool:
        """Whether the step makes a product with `H`."""
        return self is not Step.EXTRAPOLATE


def plan(steps: int, product_every: int = 1) -> tuple[Step, ...]:
    """`steps` moves and the objective at the end.

    The first two moves make a product of their own, because an extrapolation needs two; after them one move in
    `product_every` does.

    Example:
        >>> [step.value for step in plan(5, product_every=3)]
        ['first', 'product', 'extrapolate', 'product', 'extrapolate', 'last']
    """
    between = [Step.PRODUCT if k < 2 or k % product_every == 0 else Step.EXTRAPOLATE for k in range(1, steps)]
    return (Step.FIRST, *between, Step.LAST)

"""The state of a geometry that another rank saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llqr.curvature.linearizer import Linearizer


def for_this_rank(state: Mapping[str, Any], linearizer: Linearizer) -> Mapping[str, Any]:
    """A saved state without what only the rank that saved it can continue.

    That is the position in its own batches, and a spread refresh under way, because that has a batch of its own. A
    refresh needs all ranks: if one of them cannot continue it, none does, and it begins again at the next step.
    """
    place = linearizer.ranks.place
    foreign = state.get("saved_by", place) != place
    if state.get("refresh") is not None and linearizer.on_any_rank(foreign):
        counters = {**state["counters"], "next": state["counters"]["step"]}
        state = {**state, "refresh": None, "counters": counters}
    return {**state, "batches": None} if foreign else state

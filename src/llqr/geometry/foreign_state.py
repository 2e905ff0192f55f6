"""The state of a geometry that another rank saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llqr.geometry.linearizer import Linearizer


def for_this_rank(state: Mapping[str, Any], linearizer: Linearizer) -> Mapping[str, Any]:
    """A saved state without what only the rank that saved it can go on with.

    That is the position in its own batches, and a spread refresh under way, which has a batch of its own too; all
    ranks must have the latter, so that they ask one another. It begins again at the next step.
    """
    foreign = state.get("saved_by", linearizer.place()) != linearizer.place()
    if state.get("refresh") is not None and linearizer.on_any_rank(foreign):
        counters = {**state["counters"], "next": state["counters"]["step"]}
        state = {**state, "refresh": None, "counters": counters}
    return {**state, "batches": None} if foreign else state

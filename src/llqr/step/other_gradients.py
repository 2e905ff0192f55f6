"""Gradients of tensors that another optimizer moves: those of a head, or of a discriminator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import ref

from torch import Tensor

from llqr.caller_warnings import warn
from llqr.dtensors import versions
from llqr.leaves import leaves_of
from llqr.step.modules import living_parameters
from llqr.step.snapshot import Snapshot


class OtherGradients:
    """Keeps what the first pass has left in the gradients of others, to which the second pass would add.

    Others are what the loss depends on, and the rest of the model. In the two-call form, and with a
    closure that returns a number, nobody tells what the loss depends on: a warning then names what is not kept.
    """

    def __init__(self) -> None:
        self._reached: list[ref[Tensor]] | None = None
        self._contents = Snapshot()
        self._strangers: list[tuple[str, Tensor, Tensor, int]] = []
        self._looked = False

    def reached_by(self, loss: Any) -> None:
        """The first time, find out what the loss depends on, and again when some of it has gone, such as inputs."""
        if self._reached is not None and all(found() is not None for found in self._reached):
            return
        if (leaves := leaves_of(loss)) is not None:
            self._reached = [ref(leaf) for leaf in leaves]

    def forget(self) -> None:
        """The optimizer has got other parameters: ask again what the loss depends on."""
        self._reached, self._looked = None, False

    def hold(self, known: Iterable[Tensor], own: Iterable[Tensor]) -> None:
        """Remember the gradients of these tensors and of those that the loss depends on, but for one's own."""
        reached = [leaf for found in self._reached or () if (leaf := found()) is not None]
        mine = set(map(id, own))
        others = {id(one): one for one in (*known, *reached) if id(one) not in mine and one.requires_grad}
        self._contents.take([gradient for one in others.values() if (gradient := one.grad) is not None])
        if self._reached is None and not self._looked:
            self._looked = True
            mine |= others.keys()
            rest = [(name, one) for name, one in living_parameters() if id(one) not in mine]
            having = [(name, one, gradient) for name, one in rest if (gradient := one.grad) is not None]
            now = versions([gradient for _, _, gradient in having])
            self._strangers = [(*stranger, version) for stranger, version in zip(having, now, strict=True)]

    def restore(self) -> None:
        """Put them back, except those that the closure or the loop has cleared since: they are the second pass's."""
        self._contents.restore()
        strangers, self._strangers = self._strangers, []
        if added := [n for n, p, g, version in strangers if p.grad is g and versions([g]) != [version]]:
            warn(
                f"step: the second pass has added to the gradients that the first one left in {', '.join(added)}, "
                "which are not the optimizer's; let the closure return the loss, or zero them before the second pass "
                "(said once)"
            )

    def __getstate__(self) -> dict[str, object]:
        return OtherGradients().__dict__

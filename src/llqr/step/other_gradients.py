"""Gradients of tensors that another optimizer moves: those of a head, or of a discriminator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import ref

from torch import Tensor, nn

from llqr.caller_warnings import warn
from llqr.distributed.dtensors import versions
from llqr.leaves import leaves_of
from llqr.step.module_trees import living_parameters
from llqr.step.snapshot import Snapshot


class OtherGradients:
    """Keeps what the first pass has left in the gradients of others, to which the second pass would add.

    Others are what the loss depends on, and the rest of the model. In the two-call form, and with a
    closure that returns a number, nobody tells what the loss depends on: a warning then names what is not kept.
    """

    def __init__(self) -> None:
        self._parameters: list[Tensor] | None = None
        self._inputs: list[ref[Tensor]] = []
        self._contents = Snapshot()
        self._strangers: list[tuple[str, Tensor, Tensor, int]] = []
        self._looked = False

    def reached_by(self, loss: Any) -> None:
        """The first time, find out what the loss depends on, and again when some of it has gone, such as inputs."""
        if self._parameters is not None and all(found() is not None for found in self._inputs):
            return
        if (leaves := leaves_of(loss)) is not None:
            # torch refuses to convert a parameter to another dtype while there are weak references to it.
            self._parameters = [leaf for leaf in leaves if isinstance(leaf, nn.Parameter)]
            self._inputs = [ref(leaf) for leaf in leaves if not isinstance(leaf, nn.Parameter)]

    def forget(self) -> None:
        """The optimizer has got other parameters: ask again what the loss depends on."""
        self._parameters, self._inputs, self._looked = None, [], False

    def hold(self, known: Iterable[Tensor], own: Iterable[Tensor]) -> None:
        """Remember the gradients of these tensors and of those that the loss depends on, but for one's own."""
        inputs = [tensor for found in self._inputs if (tensor := found()) is not None]
        mine = set(map(id, own))
        candidates = (*known, *(self._parameters or ()), *inputs)
        others = {id(one): one for one in candidates if id(one) not in mine and one.requires_grad}
        self._contents.take([gradient for one in others.values() if (gradient := one.grad) is not None])
        if self._parameters is None and not self._looked:
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

"""The modules that own the optimizer's parameters, and what a pass may write to there: buffers and other states."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from llqr.caller_warnings import warn
from llqr.distributed.dtensors import any_sharded, drop_gathered, local
from llqr.leaves import leaves_of
from llqr.step.attributes import Kept, kept_by, may_keep, put_back
from llqr.step.module_trees import ModuleTrees, living_modules, outermost, trained_apart
from llqr.step.other_threads import computing_times, idle_since
from llqr.step.snapshot import Snapshot

#: Objects that Python itself has hidden from those who look for all that there are.
FROZEN = gc.get_freeze_count()
#: Tensors of other classes, such as quantized ones, may have no memory of their own.
PLAIN = (Tensor, nn.Parameter)
#: A buffer and where it is: its module, its name there, and the tensor.
Slot = tuple[nn.Module, str, Tensor]


class OwningModules:
    """The modules that own the parameters: given, or found at the first step.

    `more` says that there may be others besides the given one, such as a loss with statistics: they are found too.
    Finding them lets `SAM(base)` protect BatchNorm statistics without being given the model. They are searched among
    all modules in memory, not through forward hooks, which `torch.compile` would compile or fail on.

    Attributes:
        trees: these modules, with everything inside the same models.
        known: whether they have been found.
    """

    def __init__(self, model: nn.Module | None, *, more: bool = False) -> None:
        self._given = [] if model is None else [model]
        self._more = more or model is None
        self.trees = ModuleTrees(self._given)
        self.known = not self._more
        self._held: list[Slot] = []
        self._marks: dict[Tensor, tuple[int, int]] = {}
        self._before: list[Kept] = []
        # Statistics are many and small: allocating their copies takes longer than copying.
        self._contents = Snapshot(keep_memory=True)

    @contextmanager
    def finding(self, parameters: Iterable[Tensor]) -> Iterator[list[Any]]:
        """Find the modules that own the parameters, and others whose buffers are written to inside the context.

        Except those of a network that another thread may be training at the same time: one with parameters to train,
        none of which the loss of this pass depends on. It is put into the list that one is given.
        """
        losses: list[Any] = []
        threads, alive = computing_times(), list(dict.fromkeys([*self.trees.modules, *living_modules()]))
        slots = _buffers_of(alive)
        self._marks, self._before = _marks_of(alive), kept_by(may_keep(alive))
        versions = [_version(buffer) for _, _, buffer in slots]
        yield losses
        if any_sharded(parameters):
            drop_gathered(alive)  # which FSDP may leave in the places of the parameters
        wanted = set(parameters)
        owners = (m for m in alive if any(p in wanted for p in m.parameters(recurse=False)))
        found = dict.fromkeys([*self._given, *owners])
        if gc.get_freeze_count() > FROZEN and not wanted <= {p for module in found for p in module.parameters()}:
            warn(
                "model: gc.freeze() hides modules; if one of them owns the optimizer's parameters, both passes of a "
                "step write to its buffers (BatchNorm statistics); pass model=model"
            )
        reached = None if idle_since(threads) else leaves_of(losses)
        for (owner, name, buffer), version in zip(slots, versions, strict=True):
            written = _buffer(owner, name) is not buffer or _version(buffer) != version
            if written and owner not in found and (reached is None or not trained_apart(owner, alive, reached)):
                found.setdefault(owner)  # such as a loss that keeps a moving average
        self.trees = ModuleTrees(outermost(found, alive))
        self.known = True
        own = set(self.trees.parameters())
        self._marks = {parameter: mark for parameter, mark in self._marks.items() if parameter in own}
        places = {id(held) for owner in self.trees.stateful for held in (owner.__dict__, owner._buffers)}
        self._before = [kept for kept in self._before if id(kept[0]) in places]

    def forget(self) -> None:
        """The optimizer has got other parameters, perhaps those of a new part of the model: look again."""
        self.known = not self._more
        self.trees = ModuleTrees(self.trees.roots)

    def mark(self) -> None:
        """Before the first pass. What it writes to of the frozen parameters is held like a buffer, see `hold_buffers`.

        A model may move them by itself whenever it is called, as MoCo does with its encoder of keys. The states that
        modules have now are those that the second pass starts from, see `rewound`.
        """
        self.unmark()
        if self.known:
            self._marks, self._before = _marks_of(self.trees.modules), kept_by(self.trees.stateful)

    def unmark(self) -> None:
        self._marks, self._before = {}, []

    @contextmanager
    def rewound(self, *, keep: bool) -> Iterator[None]:
        """While entered, for the second pass, the states that modules keep as attributes are those before the first.

        With `keep`, they are those after the first one in the end.
        """
        after = kept_by(self.trees.stateful) if keep else []
        put_back(self._before)
        try:
            yield
        finally:
            put_back(after)

    def hold_buffers(self) -> None:
        """Remember every buffer: its content, and which tensor it is, because a module may replace it by a new one."""
        self._held = _buffers_of(self.trees.modules)
        written = [parameter for parameter, mark in self._marks.items() if _mark(parameter) != mark]
        self._marks = {}
        writable = {id(buffer): buffer for _, _, buffer in self._held if _writable(buffer)}
        self._contents.take([*writable.values(), *written])

    def restore_buffers(self) -> None:
        """Put back what `hold_buffers` remembered, if anything."""
        for owner, name, buffer in self._held:
            if _buffer(owner, name) is not buffer:
                setattr(owner, name, buffer)
        self._held = []
        self._contents.restore()


def _buffers_of(modules: Iterable[nn.Module]) -> list[Slot]:
    return [(module, name, b) for module in modules for name, b in module._buffers.items() if b is not None]


def _buffer(module: nn.Module, name: str) -> Tensor | None:
    return dict(module._buffers.items()).get(name)  # those of a torch.jit module are not in a dictionary


def _marks_of(modules: Iterable[nn.Module]) -> dict[Tensor, tuple[int, int]]:
    """The frozen parameters, with what changes when they are written to."""
    found = (parameter for module in modules for parameter in module._parameters.values() if parameter is not None)
    return {parameter: _mark(parameter) for parameter in found if not parameter.requires_grad}


def _mark(parameter: Tensor) -> tuple[int, int]:
    (part,) = local([parameter])
    return _version(part), part.data_ptr() if type(part) in PLAIN else 0


def _version(tensor: Tensor) -> int:
    """Changes when the tensor is written to; those made in inference mode have none, and those without a shape yet."""
    return 0 if is_lazy(tensor) or tensor.is_inference() else tensor._version


def _writable(tensor: Tensor) -> bool:
    """Whether a pass can write to it. An expanded tensor has several entries in one place."""
    if is_lazy(tensor):
        return False
    if tensor.is_inference() or tensor.layout != torch.strided:
        return not tensor.is_inference()
    return not any(size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True))

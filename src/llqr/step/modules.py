"""The modules that own the optimizer's parameters: names, biases, and buffers that a pass may write to."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from llqr.dtensors import any_sharded, drop_gathered, local
from llqr.leaves import leaves_of
from llqr.metric.layout import layer_of
from llqr.step.attributes import Kept, kept_by, may_keep, put_back
from llqr.step.snapshot import Snapshot

#: Tensors of other classes, such as quantized ones, may have no memory of their own.
PLAIN = (Tensor, nn.Parameter)
#: A buffer and where it is: its module, its name there, and the tensor.
Slot = tuple[nn.Module, str, Tensor]


class Search:
    """What a pass tells about the modules that it used: its loss."""

    loss: Any = None


class OwningModules:
    """The modules that own the parameters: given, or found at the first step.

    Finding them lets `SAM(base)` protect BatchNorm statistics without being given the model. They are searched among
    all modules in memory, not through forward hooks, which `torch.compile` would compile or fail on.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._modules: list[nn.Module] = [] if model is None else [model]
        self.known = self.given = model is not None
        self._places: dict[Tensor, tuple[int, str]] | None = None
        self._owners: list[nn.Module] | None = None
        self._stateful: list[nn.Module] | None = None
        self._roles: tuple[list[int], list[int], list[bool]] | None = None
        self._held: list[Slot] = []
        self._marks: dict[Tensor, tuple[int, int]] = {}
        self._before: list[Kept] = []
        # Statistics are many and small: allocating their copies takes longer than copying.
        self._contents = Snapshot(keep_memory=True)

    @contextmanager
    def finding(self, parameters: Iterable[Tensor]) -> Iterator[Search]:
        """Find the modules that own the parameters, and others whose buffers are written to inside the context.

        Except those of a network that another thread may be training at the same time: one with parameters to train,
        none of which the loss of this pass depends on.
        """
        alive, search = _living_modules(), Search()
        slots = _buffers_of(alive)
        self._marks, self._before = _marks_of(alive), kept_by(may_keep(alive))
        versions = [_version(buffer) for _, _, buffer in slots]
        yield search
        if any_sharded(parameters):
            drop_gathered(alive)  # which FSDP may leave in the places of the parameters
        found = _owners(alive, parameters)
        reached = leaves_of(search.loss)
        for (owner, name, buffer), version in zip(slots, versions, strict=True):
            written = _buffer(owner, name) is not buffer or _version(buffer) != version
            if written and owner not in found and not _trained_elsewhere(owner, alive, reached):
                found.setdefault(owner)  # such as a loss that keeps a moving average
        self._modules = _outermost(found, alive)
        self.known = True
        self._places = self._owners = self._stateful = self._roles = None
        own = {parameter for owner in self._all() for parameter in owner._parameters.values()}
        self._marks = {parameter: mark for parameter, mark in self._marks.items() if parameter in own}
        places = {id(held) for owner in self._keepers() for held in (owner.__dict__, owner._buffers)}
        self._before = [kept for kept in self._before if id(kept[0]) in places]

    def forget(self) -> None:
        """The optimizer has got other parameters, perhaps those of a new part of the model: look again."""
        self.known = self.given
        self._places = self._owners = self._stateful = self._roles = None

    def name(self, parameter: Tensor) -> str | None:
        """The name a parameter has in its model, if that is known."""
        place = self._named().get(parameter)
        return None if place is None else place[1]

    def _named(self) -> dict[Tensor, tuple[int, str]]:
        """Parameter -> the number of its model, and its name there."""
        if self._places is None:
            self._places = {}
            for i, module in enumerate(self._modules):
                for name, parameter in module.named_parameters():
                    self._places.setdefault(parameter, (i, name))
        return self._places

    def mark(self) -> None:
        """Before the first pass. What it writes to of the frozen parameters is held like a buffer, see `hold_buffers`.

        A model may move them by itself whenever it is called, as MoCo does with its encoder of keys. The states that
        modules have now are those that the second pass starts from, see `rewound`.
        """
        self.unmark()
        if self.known:
            self._marks, self._before = _marks_of(self._all()), kept_by(self._keepers())

    def unmark(self) -> None:
        self._marks, self._before = {}, []

    @contextmanager
    def rewound(self, *, keep: bool) -> Iterator[None]:
        """While entered, for the second pass, the states that modules keep as attributes are those before the first.

        With `keep`, they are those after the first one in the end.
        """
        after = kept_by(self._keepers()) if keep else []
        put_back(self._before)
        try:
            yield
        finally:
            put_back(after)

    def hold_buffers(self) -> None:
        """Remember every buffer: its content, and which tensor it is, because a module may replace it by a new one."""
        self._held = _buffers_of(self._all())
        written = [parameter for parameter, mark in self._marks.items() if _mark(parameter) != mark]
        self._marks = {}
        writable = {id(buffer): buffer for _, _, buffer in self._held if _writable(buffer)}
        self._contents.take([*writable.values(), *written])

    def _all(self) -> list[nn.Module]:
        if self._owners is None:
            self._owners = list(dict.fromkeys(owner for module in self._modules for owner in module.modules()))
        return self._owners

    def _keepers(self) -> list[nn.Module]:
        if self._stateful is None:
            self._stateful = may_keep(self._all())
        return self._stateful

    def parameters(self) -> list[Tensor]:
        """All of them, the optimizer's and others."""
        return [p for owner in self._all() for p in owner._parameters.values() if p is not None]

    def gather_again(self) -> None:
        """Let FSDP2 drop the weights that it has gathered: they are not those of shards that move, or have moved."""
        drop_gathered(self._all())

    def restore_buffers(self) -> None:
        """Put back what `hold_buffers` remembered, if anything."""
        for owner, name, buffer in self._held:
            if _buffer(owner, name) is not buffer:
                setattr(owner, name, buffer)
        self._held = []
        self._contents.restore()

    def roles(self, parameters: Sequence[Tensor]) -> tuple[list[int], list[bool]]:
        """The layer number of each parameter, shared by weight and bias of one module, and whether it is a bias.

        Biases are known by name where the model is known; otherwise every vector counts as one.
        """
        asked = list(map(id, parameters))
        if self._roles is None or self._roles[0] != asked:
            named = self._named()
            numbers: dict[object, int] = {}
            keys = [(named[p][0], layer_of(named[p][1])) if p in named else p for p in parameters]
            layers = [numbers.setdefault(key, len(numbers)) for key in keys]
            biases = [named[p][1].endswith("bias") if p in named else p.ndim <= 1 for p in parameters]
            self._roles = asked, layers, biases
        return self._roles[1:]


def _living_modules() -> list[nn.Module]:
    # `type` rather than `isinstance`, which would load lazy proxies; modules still under construction are left out.
    return [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module) and hasattr(thing, "_buffers")]


def living_parameters() -> list[tuple[str, Tensor]]:
    """Those of all modules in memory, with the names that these have for them."""
    owned = [(type(module).__name__, module._parameters) for module in _living_modules()]
    return [(f"{kind}.{name}", p) for kind, held in owned for name, p in held.items() if p is not None]


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
    """Changes when the tensor is written to; those made in inference mode have none, and cannot be."""
    return 0 if tensor.is_inference() else tensor._version


def _writable(tensor: Tensor) -> bool:
    """Whether a pass can write to it. An expanded tensor has several entries in one place."""
    if tensor.is_inference() or tensor.layout != torch.strided:
        return not tensor.is_inference()
    return not any(size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _owners(modules: Iterable[nn.Module], parameters: Iterable[Tensor]) -> dict[nn.Module, None]:
    wanted = set(parameters)
    return dict.fromkeys(m for m in modules if any(p in wanted for p in m.parameters(recurse=False)))


def _trained_elsewhere(module: nn.Module, alive: Sequence[nn.Module], reached: set[Tensor] | None) -> bool:
    if reached is None or _only_thread():
        return False
    roots = _outermost([module], alive)
    trained = [p for root in roots for p in root.parameters() if p.requires_grad]
    return bool(trained) and reached.isdisjoint(trained)


def _only_thread() -> bool:
    """Whether no other thread can be training. Those that load data or draw progress bars are daemons."""
    return all(thread.daemon or thread is threading.current_thread() for thread in threading.enumerate())


def _outermost(found: Iterable[nn.Module], modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The roots of the module trees that the found ones belong to."""
    parents: dict[nn.Module, list[nn.Module]] = {}
    for module in modules:
        for child in module.children():
            parents.setdefault(child, []).append(module)
    roots: dict[nn.Module, None] = {}
    visited: set[nn.Module] = set()
    climbing = list(found)[::-1]
    while climbing:
        module = climbing.pop()
        if module in visited:
            continue
        visited.add(module)
        climbing += parents.get(module, [])
        if module not in parents:
            roots.setdefault(module)
    return list(roots)

"""What the optimizer knows of the modules around its parameters: names, biases, and buffers a pass may write to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from .metric.layout import layer_of
from .snapshot import Snapshot


class Surroundings:
    """The modules around the parameters: given, or seen at work during the first pass of the first step.

    Seeing them is what lets `SAM(base)` protect BatchNorm statistics without being handed the model.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._modules: list[nn.Module] = [] if model is None else [model]
        self.known = model is not None
        self._names: dict[Tensor, str] | None = None
        self._slots: list[tuple[nn.Module, str, Tensor]] = []
        self._contents = Snapshot()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note every module that is called, the outermost first."""
        seen: dict[nn.Module, None] = {}

        def note(module: nn.Module, inputs: Any) -> None:
            seen.setdefault(module)

        handle = register_module_forward_pre_hook(note)
        try:
            yield
        finally:
            handle.remove()
        inside = {child for module in seen for child in module.modules() if child is not module}
        self._modules = [module for module in seen if module not in inside]
        self.known = True
        self._names = None

    def names(self) -> dict[Tensor, str]:
        """Parameter -> the name it has in its model."""
        if self._names is None:
            self._names = {}
            for module in self._modules:
                for name, parameter in module.named_parameters():
                    self._names.setdefault(parameter, name)
        return self._names

    def hold_buffers(self) -> None:
        """Remember every buffer: its content, and which tensor it is, for a module may put a new one in its place."""
        owners = [owner for module in self._modules for owner in module.modules()]
        self._slots = [(owner, name, b) for owner in owners for name, b in owner.named_buffers(recurse=False)]
        self._contents.take(list(dict.fromkeys(buffer for _, _, buffer in self._slots)))

    def restore_buffers(self) -> None:
        """Put them back; does nothing when none are held."""
        for owner, name, buffer in self._slots:
            if getattr(owner, name) is not buffer:
                setattr(owner, name, buffer)
        self._slots = []
        self._contents.restore()

    def layers(self, parameters: Sequence[Tensor]) -> list[int]:
        """A number a parameter; weight and bias of one module share theirs."""
        names = self.names()
        numbers: dict[object, int] = {}
        keys = [layer_of(names[p]) if p in names else p for p in parameters]
        return [numbers.setdefault(key, len(numbers)) for key in keys]

    def is_bias(self, parameters: Sequence[Tensor]) -> list[bool]:
        """By name where the model is known, otherwise every vector."""
        names = self.names()
        return [names[p].endswith("bias") if p in names else p.ndim <= 1 for p in parameters]

"""Modules as trees: those in memory, and the whole models that some of them belong to."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from functools import cached_property

from torch import Tensor, nn

from llqr.metric.layout import layer_of
from llqr.step.attributes import may_keep


class ModuleTrees:
    """Some models: all of their modules, and what their parameters are called."""

    def __init__(self, roots: list[nn.Module]) -> None:
        self.roots = roots
        self._roles: tuple[list[int], list[int], list[bool]] | None = None

    @cached_property
    def modules(self) -> list[nn.Module]:
        return list(dict.fromkeys(module for root in self.roots for module in root.modules()))

    @cached_property
    def stateful(self) -> list[nn.Module]:
        """Those that may have states besides their buffers."""
        return may_keep(self.modules)

    @cached_property
    def _named(self) -> dict[Tensor, tuple[int, str]]:
        """Parameter -> the number of its model, and its name there."""
        places: dict[Tensor, tuple[int, str]] = {}
        for i, root in enumerate(self.roots):
            for name, parameter in root.named_parameters():
                places.setdefault(parameter, (i, name))
        return places

    def parameters(self) -> list[Tensor]:
        """All of them, the optimizer's and others."""
        return [p for module in self.modules for p in module._parameters.values() if p is not None]

    def name(self, parameter: Tensor) -> str | None:
        """The name a parameter has in its model, if that is known."""
        place = self._named.get(parameter)
        return None if place is None else place[1]

    def roles(self, parameters: Sequence[Tensor]) -> tuple[list[int], list[bool]]:
        """The layer number of each parameter, shared by weight and bias of one module, and whether it is a bias.

        Biases are known by name where the model is known; otherwise every vector counts as one.
        """
        asked = list(map(id, parameters))
        if self._roles is None or self._roles[0] != asked:
            named = self._named
            numbers: dict[object, int] = {}
            keys = [(named[p][0], layer_of(named[p][1])) if p in named else p for p in parameters]
            layers = [numbers.setdefault(key, len(numbers)) for key in keys]
            biases = [named[p][1].endswith("bias") if p in named else p.ndim <= 1 for p in parameters]
            self._roles = asked, layers, biases
        return self._roles[1:]


def living_modules() -> list[nn.Module]:
    # `type` rather than `isinstance`, which would load lazy proxies; modules still under construction are left out.
    return [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module) and hasattr(thing, "_buffers")]


def living_parameters() -> list[tuple[str, Tensor]]:
    """Those of all modules in memory, with the names that these have for them."""
    owned = [(type(module).__name__, module._parameters) for module in living_modules()]
    return [(f"{kind}.{name}", p) for kind, held in owned for name, p in held.items() if p is not None]


def trained_apart(module: nn.Module, alive: Sequence[nn.Module], reached: set[Tensor]) -> bool:
    """Whether the model of this module has parameters to train, none of which was reached."""
    roots = outermost([module], alive)
    trained = [p for root in roots for p in root.parameters() if p.requires_grad]
    return bool(trained) and reached.isdisjoint(trained)


def outermost(found: Iterable[nn.Module], modules: Iterable[nn.Module]) -> list[nn.Module]:
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

"""What the modules of a model hold: parameters and buffers by name, and everything they have, to be put back."""

import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook


def places(root: nn.Module) -> dict[str, str]:
    """Every place that holds a parameter or a buffer -> the one name its tensor goes by.

    Tied tensors have several places. A module that the model holds twice is one place: `functional_call`, left to find
    tied tensors itself, would visit it twice and leave the replacement behind in the model.
    """
    named = [*root.named_parameters(), *root.named_buffers()]
    names = {id(tensor): name for name, tensor in named}
    return {
        f"{owner}.{local}": names[id(tensor)]
        for owner, module in root.named_modules()
        for local, tensor in [*module._parameters.items(), *module._buffers.items()]
        if tensor is not None
    }


def holders(modules: Iterable[nn.Module]) -> list[dict[str, Any]]:
    """Where modules hold parameters, buffers, and attributes such as a state that they go on from."""
    return [held for module in modules for held in (module._parameters, module._buffers, module.__dict__)]


def unchanged(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Whether a module holds the same objects as before."""
    return len(now) == len(before) and all(map(is_, now.values(), before.values()))


def reattach(held: Sequence[dict[str, Any]], before: Sequence[dict[str, Any]]) -> None:
    """Put back what the modules held before, also if an interrupt came while torch was doing so."""
    for now, own in zip(held, before, strict=True):
        if unchanged(now, own):
            continue
        for name in now.keys() - own.keys():
            del now[name]
        for name, value in own.items():
            if name not in now or now[name] is not value:
                now[name] = value


@contextmanager
def noticed_calls() -> Iterator[dict[nn.Module, None]]:
    """The modules that this thread calls while it is entered, with those inside; in the end they are as before."""
    thread = threading.get_ident()
    found: dict[nn.Module, None] = {}
    held: list[dict[str, Any]] = []
    before: list[dict[str, Any]] = []
    contents: list[tuple[Tensor, Tensor]] = []

    def notice(module: nn.Module, inputs: Any) -> None:
        if threading.get_ident() != thread or module in found:
            return
        new = [one for one in module.modules() if one not in found]
        found.update(dict.fromkeys(new))
        held.extend(holders(new))
        before.extend(map(dict, holders(new)))
        contents.extend((buffer, buffer.clone()) for one in new for buffer in one.buffers(recurse=False))

    handle = register_module_forward_pre_hook(notice)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")
            yield found
    finally:
        handle.remove()
        reattach(held, before)
        with torch.no_grad():
            for buffer, content in contents:
                buffer.copy_(content)

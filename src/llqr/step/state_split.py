"""A state dictionary as tensors by name and a text, for formats that hold nothing else, such as safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from llqr.step.saved_state import taken_apart

#: What stands in the text for a tensor, and for what JSON has no form of its own.
TENSOR, TUPLE, KEYS = "__tensor__", "__tuple__", "__keys__"


def split_state(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], str]:
    """The tensors of a state dictionary by names such as `state/0/momentum_buffer`, and everything else as JSON.

    Each tensor is contiguous, and one that occurs twice is stored once, as safetensors wants it. `joined_state` is the
    inverse.

    Example:
        >>> import torch
        >>> tensors, text = split_state({"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1}]})
        >>> list(tensors), joined_state(tensors, text)["param_groups"]
        (['state/0/exp_avg'], [{'lr': 0.1}])

    With safetensors: `save_file(tensors, path, {"state": text})`, and back through `safe_open(path, "pt")`, its
    `get_tensor` for each of its `keys()`, and `metadata()["state"]`.
    """
    tensors: dict[str, Tensor] = {}
    names: dict[int, str] = {}

    def outline(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in names:
                names[id(value)] = path
                tensors[path] = value.detach().contiguous()
            return {TENSOR: names[id(value)]}
        if isinstance(value, Mapping):
            items = [(key, outline(part, f"{path}/{key}" if path else str(key))) for key, part in value.items()]
            if all(isinstance(key, str) for key, _ in items):
                return dict(items)
            return {KEYS: [[key, part] for key, part in items]}
        if isinstance(value, list | tuple):
            parts = [outline(part, f"{path}/{i}") for i, part in enumerate(value)]
            return parts if isinstance(value, list) else {TUPLE: parts}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise TypeError(f"state: {path} is a {type(value).__name__}, which has no form as text")

    plain, own = taken_apart(state)  # without the copy for torch.distributed.checkpoint
    return tensors, json.dumps(outline(plain | ({} if own is None else {"llqr": own}), ""))


def joined_state(tensors: Mapping[str, Tensor], text: str) -> dict[str, Any]:
    """The state dictionary that `split_state` took apart.

    Example:
        >>> joined_state(*split_state({"param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]}))
        {'param_groups': [{'lr': 0.1, 'betas': (0.9, 0.99)}]}
    """

    def filled(value: Any) -> Any:
        if isinstance(value, list):
            return [filled(part) for part in value]
        if not isinstance(value, dict):
            return value
        if TENSOR in value:
            return tensors[value[TENSOR]]
        if TUPLE in value:
            return tuple(filled(part) for part in value[TUPLE])
        if KEYS in value:
            return {key: filled(part) for key, part in value[KEYS]}
        return {key: filled(part) for key, part in value.items()}

    state: dict[str, Any] = filled(json.loads(text))
    return state

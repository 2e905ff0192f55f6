"""One batch: its inputs and targets, its tensors, its samples, and how a model is called on the inputs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils import _pytree as pytree

T = TypeVar("T")
Batch = tuple[Any, Any] | Mapping[str, Any]

#: Where the targets are looked for in a batch that is a mapping, in this order: next to "labels", "target" is an
#: input of a sequence model.
TARGET_KEYS = ("targets", "labels", "target", "label", "y")


def split_batch(batch: Batch) -> tuple[Any, Any]:
    """A batch as (inputs, targets)."""
    if isinstance(batch, Mapping):
        for key in TARGET_KEYS:
            if key in batch:
                return {name: value for name, value in batch.items() if name != key}, batch[key]
        raise ValueError(f"batch: a mapping needs one of the keys {', '.join(TARGET_KEYS)}, got {', '.join(batch)}")
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    raise TypeError(
        "batch: expected (inputs, targets), a mapping with targets, or a callable that returns one of these"
    )


def opened(batch: T) -> T:
    """Mappings of other classes, such as tokenizers return, as dictionaries: torch's trees do not look into others."""
    plain: T = pytree.tree_map(lambda leaf: opened(dict(leaf)) if isinstance(leaf, Mapping) else leaf, batch)
    return plain


def tensors_of(batch: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]


def batch_signature(batch: Batch) -> Any:
    """What captured graphs hold fixed: the structure of the batch, and its tensors' shapes, dtypes and devices."""
    leaves, structure = pytree.tree_flatten(batch)
    return structure, [(leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def pieces_of(inputs: Any, size: int) -> list[Any]:
    """Cut every tensor that has the batch dimension into pieces of `size` rows."""
    inputs = opened(inputs)
    rows = samples_in(inputs)
    if not rows:
        raise ValueError("micro_batch: found no tensor with a batch dimension in the inputs")
    return [taken_rows(inputs, slice(start, start + size)) for start in range(0, rows, size)]


def samples_in(batch: Any) -> int | None:
    """How many samples a batch has: the length of its first tensor that has one."""
    return next((len(tensor) for tensor in tensors_of(batch) if tensor.ndim), None)


def taken_rows(batch: T, rows: slice | Tensor) -> T:
    """Some of the samples: every tensor that has the batch dimension is cut."""
    samples = samples_in(batch)

    def cut(tensor: Tensor) -> Tensor:
        return tensor[rows] if tensor.ndim and len(tensor) == samples else tensor

    found: T = pytree.tree_map_only(Tensor, cut, batch)
    return found


def call_model(model: nn.Module, inputs: Any) -> Any:
    """`model(inputs)`, with mappings and tuples spread out, and `.logits` taken from objects that have it."""
    named: Mapping[str, Any] = inputs if isinstance(inputs, Mapping) else {}
    listed: Sequence[Any] = inputs if isinstance(inputs, tuple | list) else () if inputs is named else (inputs,)
    try:
        outputs = model(*listed, **named)
    except TypeError as error:
        if _takes(model, listed, named):
            raise
        raise TypeError(
            f"batch: its inputs do not fit {type(model).__name__}.forward ({error}); give the geometry a "
            "forward=lambda model, inputs: ..., which calls the model"
        ) from error
    except ValueError as error:
        if not named:
            raise
        raise ValueError(
            f"batch: {type(model).__name__} cannot be called on {', '.join(named)} ({error}); the targets are not "
            "among its inputs, so that an encoder-decoder needs decoder_input_ids beside them, or a forward="
        ) from error
    return getattr(outputs, "logits", outputs)


def _takes(model: nn.Module, listed: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Whether the model has arguments for these inputs, so that a type error is one of its own."""
    try:
        inspect.signature(model.forward).bind(*listed, **named)
    except TypeError:
        return False
    return True

"""What a user gives besides the model: a batch of inputs and targets, and a loss."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

T = TypeVar("T")
Batch = tuple[Any, Any] | Mapping[str, Any]
Loss = Callable[[Tensor, Any], Tensor]

#: Where to look for the targets in a batch that is a mapping, in this order: next to "labels", "target" is an input of
#: a sequence model.
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
    """Replace mappings of other classes, such as tokenizers return, by dictionaries, which torch's trees look into."""
    plain: T = pytree.tree_map(lambda leaf: opened(dict(leaf)) if isinstance(leaf, Mapping) else leaf, batch)
    return plain


def tensors_of(batch: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]


def batch_signature(batch: Batch) -> Any:
    """What captured graphs hold fixed: the structure of a batch, and its tensors' shapes, dtypes and devices."""
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
    except (TypeError, ValueError) as error:
        error.add_note(
            f"batch: {type(model).__name__} was called on the inputs alone, without the targets; if it is to be called "
            "in another way, pass forward=lambda model, inputs: ..."
        )
        raise
    return getattr(outputs, "logits", outputs)


def is_sum(loss_fn: Loss) -> bool:
    """Whether a loss says that it is a sum: a module's attribute, or a partial's keyword."""
    return bool(setting(loss_fn, "reduction", "mean") == "sum")


def ignore_index(loss_fn: Loss) -> int:
    """The target a cross-entropy leaves out: a module's attribute, a partial's keyword, or torch's default -100."""
    return int(setting(loss_fn, "ignore_index", -100))


def setting(loss_fn: Any, name: str, default: Any) -> Any:
    """What a loss was made with: a module's attribute, or a partial's keyword."""
    loss_fn = inspect.unwrap(loss_fn)  # of a compiled function
    if isinstance(loss_fn, functools.partial):
        return loss_fn.keywords[name] if name in loss_fn.keywords else setting(loss_fn.func, name, default)
    return getattr(loss_fn, name, default)


def counted_terms(loss_fn: Loss, targets: Any, outputs: Tensor) -> Tensor:
    """How many terms a mean loss averages: targets that are not ignored, or the batch size."""
    own: Callable[[Any], Tensor] | None = getattr(loss_fn, "terms", None)
    if own is not None:
        return own(targets)
    # Targets in the shape of the outputs are no classes, even if they are whole numbers: every sample is a term.
    classes = isinstance(targets, Tensor) and not (targets.is_floating_point() or targets.is_complex())
    if classes and targets.shape != outputs.shape:
        counted: Tensor = (targets != ignore_index(loss_fn)).sum()
        return counted
    rows = outputs.shape[0] if outputs.ndim else 1
    return torch.full((), rows, device=outputs.device)  # by a kernel: no copy from the host, which a graph cannot hold


class ShiftedCrossEntropy:
    """The mean loss of a causal language model: outputs at one place predict the target of the next.

    Args:
        ignore_index: targets that are left out.

    Example:
        >>> tokens = torch.tensor([[1, 2, 0]])
        >>> logits = torch.full((1, 3, 4), -100.0)
        >>> logits[0, 0, 2] = logits[0, 1, 0] = 100.0
        >>> ShiftedCrossEntropy()(logits, tokens).item()
        0.0
    """

    def __init__(self, ignore_index: int = -100) -> None:
        self.ignore_index = ignore_index

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(
            logits[..., :-1, :].flatten(0, -2), targets[..., 1:].flatten(), ignore_index=self.ignore_index
        )

    def terms(self, targets: Tensor) -> Tensor:
        """How many targets the mean is over."""
        return (targets[..., 1:] != self.ignore_index).sum()

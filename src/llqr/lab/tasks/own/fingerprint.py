"""Short texts that change with a user's code, model or data, so that runs of different experiments are not mixed."""

import ast
import hashlib
import inspect
import re
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

LENGTH = 16


def of_texts(texts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:LENGTH]


def of_files(files: Iterable[Path]) -> str:
    """Of Python files; comments and layout do not count."""
    return of_texts(ast.unparse(ast.parse(path.read_text())) for path in sorted(files))


def of_data(data: Any, first_batch: Any) -> str:
    """Of the number of samples or batches, and of the first batch."""
    count = len(data) if hasattr(data, "__len__") else -1
    return of_texts([str(count), *(_text(leaf) for leaf in pytree.tree_leaves(first_batch))])


def of_model(model: Any) -> str:
    """Of a network and its weights, or of the function that makes one."""
    if not isinstance(model, nn.Module):
        return of_function(model)
    return of_texts([repr(model), *(f"{name} {_text(tensor)}" for name, tensor in model.state_dict().items())])


def of_function(function: Any) -> str:
    """Of the source of a function where there is one, otherwise of how it is printed, without its address."""
    try:
        return of_texts([ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(function))))])
    except (OSError, TypeError, SyntaxError):  # built-in, an instance, or a part of a line
        return of_texts([re.sub(r" at 0x[0-9a-f]+", "", repr(function))])


def _text(leaf: Any) -> str:
    if not isinstance(leaf, Tensor) or leaf.is_meta:
        return repr(leaf)
    numbers = leaf.detach().cpu().contiguous()
    raw = numbers.reshape(-1).view(torch.uint8).numpy().tobytes() if numbers.numel() else b""
    return f"{numbers.dtype} {tuple(numbers.shape)} {hashlib.sha256(raw).hexdigest()}"

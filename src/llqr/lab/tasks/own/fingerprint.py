"""Short texts that change with a user's code, model or data, so that runs of different experiments are not mixed."""

import ast
import hashlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import llqr

LENGTH = 16
LIBRARY = Path(llqr.__file__).resolve().parent


def of_texts(texts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:LENGTH]


def of_files(files: Iterable[Path]) -> str:
    """Of Python files; comments and layout do not count."""
    return of_texts(ast.unparse(ast.parse(path.read_bytes())) for path in sorted(files))


def of_data(data: Any, read: Callable[[], Any]) -> str:
    """Of the number of samples or batches, and of what ``read`` returns of them.

    It is read twice: what the data draw from random numbers of their own is not the same again, and does not count.
    """
    count = len(data) if hasattr(data, "__len__") else -1
    once, again = ([_text(leaf) for leaf in pytree.tree_leaves(read())] for _ in range(2))
    return of_texts([str(count), *(one for one, other in zip(once, again, strict=False) if one == other)])


def of_model(model: nn.Module, *, weights: bool) -> str:
    """Of a network, with its weights or only with their shapes."""
    texts = {name: _text(one) if weights else str(tuple(one.shape)) for name, one in model.state_dict().items()}
    return of_texts([_printed(model), *(f"{name} {text}" for name, text in texts.items())])


def of_function(function: Any) -> str:
    """Of the source of a function where there is one, otherwise of how it is printed, without its address.

    Numbers and texts that it takes from around it count, too: `lambda: network(width)` reads the same for any width.
    """
    try:
        text = ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(function))))
    except (OSError, TypeError, SyntaxError):  # built-in, an instance, or a part of a line
        text = _printed(function)
    return of_texts([text, *_taken_from_around(function)])


def _taken_from_around(function: Any) -> list[str]:
    if not inspect.isfunction(function):
        return []
    found = inspect.getclosurevars(function)
    taken = [*found.globals.items(), *found.nonlocals.items(), *enumerate(function.__defaults__ or ())]
    taken += (function.__kwdefaults__ or {}).items()
    return [f"{name}={value!r}" for name, value in taken if isinstance(value, bool | int | float | str)]


def _printed(thing: Any) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", repr(thing))


def _text(leaf: Any) -> str:
    return of_tensor(leaf) if isinstance(leaf, Tensor) and not leaf.is_meta else repr(leaf)


def of_tensor(tensor: Tensor) -> str:
    numbers = tensor.detach().cpu().contiguous()
    raw = numbers.reshape(-1).view(torch.uint8).numpy().tobytes() if numbers.numel() else b""
    return f"{numbers.dtype} {tuple(numbers.shape)} {hashlib.sha256(raw).hexdigest()}"


def files_of(path: Path, root: Path, package: str = "") -> set[Path]:
    """``path`` and what it imports, directly or not, from the folder ``root``; all of it in ``package``, if named.

    Found by the import statements, also those inside of functions, so that it does not matter what is imported already.
    """
    found: set[Path] = set()
    waiting = [path]
    while waiting:
        file = waiting.pop().resolve()
        if file in found or file.is_relative_to(LIBRARY):
            continue
        found.add(file)
        for node in ast.walk(ast.parse(file.read_bytes())):
            waiting += _imported(node, file, root, package)
    return found


def _imported(node: ast.AST, file: Path, root: Path, package: str) -> Iterator[Path]:
    names, place = [], root
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        module = [node.module] if node.module else []
        names = [".".join([*module, *name]) for name in ([], *([alias.name] for alias in node.names))]
        place = file.parents[node.level - 1] if node.level else root
    for name in names:
        parts = name.split(".")
        if place == root and package and parts[0] != package:
            continue
        for count in range(1, len(parts) + 1):  # packages run their __init__.py
            target = place.joinpath(*parts[:count])
            yield from (one for one in (target.with_name(f"{target.name}.py"), target / "__init__.py") if one.is_file())

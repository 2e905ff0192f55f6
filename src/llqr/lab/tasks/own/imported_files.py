"""The Python files that an experiment is made of: its own, and those beside it that it imports."""

import ast
from collections.abc import Iterator
from pathlib import Path

import llqr

LIBRARY = Path(llqr.__file__).resolve().parent


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
        for node in ast.walk(ast.parse(file.read_text())):
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

"""The rooms of the laboratory depend on each other in one direction only."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import llqr.lab

LAB = Path(llqr.lab.__file__).parent


def imported_rooms(lab: Path) -> dict[str, set[str]]:
    """For every room (a folder or a module of the laboratory) those that it imports, also inside of functions."""
    rooms: dict[str, set[str]] = {}
    for file in lab.rglob("*.py"):
        room = file.relative_to(lab).parts[0].removesuffix(".py")
        tree = ast.parse(file.read_text())
        # What only annotations need is not imported: a task reads a `Run`, which builds its task.
        annotations = {node for test in ast.walk(tree) if is_type_checking(test) for node in ast.walk(test)}
        for node in set(ast.walk(tree)) - annotations:
            for name in imported(node):
                if name.startswith("llqr.lab.") and (other := name.split(".")[2]) != room:
                    rooms.setdefault(room, set()).add(other)
    return rooms


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"{node.module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []


def test_no_room_imports_one_that_imports_it():
    order = list(TopologicalSorter(imported_rooms(LAB)).static_order())
    assert {"errors", "runs", "training", "cli"} <= set(order)


def test_a_cycle_is_found(tmp_path):
    for room, other in (("runs", "training"), ("training", "runs")):
        (tmp_path / room).mkdir()
        (tmp_path / room / "part.py").write_text(f"def work():\n    from llqr.lab.{other} import part\n")
    with pytest.raises(CycleError, match="cycle"):
        list(TopologicalSorter(imported_rooms(tmp_path)).static_order())

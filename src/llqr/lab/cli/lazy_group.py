"""A group of commands that imports the module of a command when it is run: torch alone takes more than a second."""

import os
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from llqr.lab.cli.interrupts import explained, quitting
from llqr.lab.errors import ConfigurationError

PLAIN: dict[str, Any] = {"rich_markup_mode": None, "pretty_exceptions_enable": False, "add_completion": False}
"""Help and errors as plain text, without typer's frames."""
TOGETHER = "runs"
"""The module whose commands several processes that torchrun starts may run together."""


class LazyGroup(TyperGroup):
    """Lists and suggests the commands of `LAZY`, which subclasses fill, without importing their modules."""

    LAZY: dict[str, tuple[str, str]] = {}
    """By name: the module in this folder whose ``app`` has the command, and the sentence that lists it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, (_, summary) in self.LAZY.items():
            self.commands[name] = TyperCommand(name, help=summary, rich_markup_mode=None)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command itself, which is about to be run or whose options are to be completed."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, None if command is None else self.load(str(name)), rest

    def load(self, name: str) -> Any:
        room, _ = self.LAZY[name]
        processes = os.environ.get("WORLD_SIZE", "1")
        if room != TOGETHER and processes != "1":  # they would all measure the same and write to the same files
            raise ConfigurationError(
                f"llqr {name} works in one process, and WORLD_SIZE says that there are {processes}: start it without "
                "torchrun."
            )
        with quitting():
            module = import_module(f"llqr.lab.cli.{room}")
        return typer.main.get_group(module.app).commands[name]

    def invoke(self, ctx: Any) -> Any:
        with explained():
            return super().invoke(ctx)

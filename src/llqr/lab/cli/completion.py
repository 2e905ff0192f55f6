"""What the shell offers for a name that is half typed: recipes, tables, networks and methods."""

from collections.abc import Iterable
from typing import Any

from llqr.lab import models
from llqr.lab.config import recipe
from llqr.lab.errors import ConfigurationError


def recipes(incomplete: str) -> list[str]:
    """Recipes and, after an @, their variants."""
    plain, at, _ = incomplete.partition("@")
    known = [f"{plain}@{variant}" for variant in recipe.load(plain).variants] if at else recipe.names()
    return _beginning(incomplete, known)


def tables(incomplete: str) -> list[str]:
    return _beginning(incomplete, dict.fromkeys(name.partition("/")[0] for name in recipe.names()))


def methods(ctx: Any, incomplete: str) -> list[str]:
    """The methods of the recipes that the command names; of a list, its last entry."""
    listed, comma, last = incomplete.rpartition(",")
    named = ctx.params.get("name") or ctx.args or recipe.names()  # several recipes are not among the parameters yet
    known: dict[str, None] = {}
    for name in [named] if isinstance(named, str) else named:
        try:
            known |= dict.fromkeys(recipe.load(name).methods)
        except ConfigurationError:  # one that is misspelt offers nothing
            continue
    return [f"{listed}{comma}{method}" for method in _beginning(last, sorted(known))]


def networks(incomplete: str) -> list[str]:
    return _beginning(incomplete, models.names())


def _beginning(incomplete: str, known: Iterable[str]) -> list[str]:
    return [name for name in known if name.startswith(incomplete)]

"""Group items by a key."""

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

T = TypeVar("T")
Key = TypeVar("Key", bound=Hashable)


def grouped(items: Iterable[T], key: Callable[[T], Key]) -> dict[Key, list[T]]:
    """The items of each key; keys and items keep their order."""
    groups: dict[Key, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups

"""Whether a saved state fits an optimizer: each check says in one sentence what differs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

Groups = Sequence[Mapping[str, Any]]


class OwnState(str):
    """Our part of a state in one piece, for `torch.distributed.checkpoint`.

    That loads into the state of a fresh optimizer, entry by entry: of a nested dictionary it would keep only what the
    fresh one has already, and a fresh metric has no factors. It leaves texts alone, so that this is one. Saved, it is
    the plain dictionary, shared with the `"llqr"` entry beside it.
    """

    content: Mapping[str, Any]

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> OwnState:
        own = cls("llqr")
        own.content = content
        return own

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (list(self.content.items()),)


def taken_apart(state: Mapping[str, Any]) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """The base optimizer's part of a state, and our own, if it has one."""
    plain = dict(state)
    own = plain.pop("llqr", None)
    groups = [dict(group) for group in plain["param_groups"]]
    for group in groups:
        found = group.pop("llqr", None)
        if own is None:
            own = found.content if isinstance(found, OwnState) else found
    return plain | {"param_groups": groups}, own


def check_probe(saved: Mapping[str, Any] | None, name: str | None) -> None:
    saved_name = None if saved is None else saved["name"]
    if saved_name != name:
        raise ValueError(f"state_dict: saved with the probe {saved_name!r}, this optimizer has {name!r}")


def check_geometry(saved: Mapping[str, Any] | None, *, expected: bool) -> None:
    if (saved is not None) != expected:
        has, lacks = ("this optimizer", "the saved one") if expected else ("the saved one", "this optimizer")
        raise ValueError(f"state_dict: {has} has a geometry, {lacks} has none")


def check_shapes(saved: Sequence[Sequence[int]], shapes: Sequence[Sequence[int]]) -> None:
    if len(saved) != len(shapes):
        raise ValueError(f"state_dict: saved for {len(saved)} parameters, this optimizer has {len(shapes)}")
    for i, (theirs, ours) in enumerate(zip(saved, shapes, strict=True)):
        if list(theirs) != list(ours):
            raise ValueError(f"state_dict: parameter {i} was saved with shape {list(theirs)}, here it is {list(ours)}")


def check_groups(saved: Groups, groups: Groups) -> None:
    """The same sizes and, where both were built from `named_parameters`, the same names in the same order."""
    theirs, ours = ([len(group["params"]) for group in some] for some in (saved, groups))
    if theirs != ours:
        raise ValueError(f"state_dict: saved groups of {theirs} parameters, this optimizer has {ours}")
    names = ([name for group in some for name in group.get("param_names", ())] for some in (saved, groups))
    for their_name, our_name in zip(*names, strict=False):
        if their_name != our_name:
            raise ValueError(f"state_dict: saved parameter {their_name!r} is in the place of {our_name!r} here")

"""Whether a saved state fits an optimizer: each check says in one sentence what differs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Groups = Sequence[Mapping[str, Any]]


class State(dict[str, Any]):
    """A state dictionary whose `"llqr"` entry is there when it is asked for, and in files.

    Those who walk through it do not meet it: `torch.distributed.checkpoint` would store the metric twice, and an entry
    of another shape than a fresh optimizer's could not be loaded. They find our part in the first group.
    """

    own: Mapping[str, Any] | None = None

    def __missing__(self, key: str) -> Any:
        if key != "llqr" or self.own is None:
            raise KeyError(key)
        return self.own

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ([*self.items(), *([] if self.own is None else [("llqr", self.own)])],)


class OwnState(str):
    """Our part of a state but for large tensors, in one piece, for `torch.distributed.checkpoint`.

    That loads into the state of a fresh optimizer, entry by entry: of a nested dictionary it would keep only what the
    fresh one has already. It leaves texts alone, so that this is one. Saved, it is the plain dictionary.
    """

    content: Mapping[str, Any]

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> OwnState:
        own = cls("llqr")
        own.content = content
        return own

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (list(self.content.items()),)


def with_own(base: Mapping[str, Any], own: Mapping[str, Any], parameters: Sequence[Tensor]) -> State:
    """The base optimizer's state and our own part."""
    rest, tensors = _large_tensors(own, parameters)
    first, *others = base["param_groups"]
    first = {**first, "llqr": OwnState.of(rest), "llqr_tensors": tensors}
    state = State(base, param_groups=[first, *others])
    state.own = own
    return state


def taken_apart(state: Mapping[str, Any]) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """The base optimizer's part of a state, and our own, if it has one."""
    plain = dict(state)
    if "param_groups" not in plain:
        raise ValueError(
            "state_dict: expected that of an optimizer, with the keys 'state' and 'param_groups', got "
            f"{', '.join(map(repr, list(plain)[:4])) or 'an empty one'}"
        )
    own = plain.pop("llqr", None)
    groups = [dict(group) for group in plain["param_groups"]]
    for group in groups:
        found, tensors = group.pop("llqr", None), group.pop("llqr_tensors", {})
        if own is None and isinstance(found, OwnState):  # nothing has been loaded into the group
            own = getattr(state, "own", None)
        if own is None and found is not None:
            own = _joined(found.content if isinstance(found, OwnState) else found, tensors)
    return plain | {"param_groups": groups}, own


def _large_tensors(own: Mapping[str, Any], parameters: Sequence[Tensor]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Our part without the factors of a metric and the memory of a probe; and these, under names that never change.

    A fresh optimizer has all of them too: identities and zeros.
    """
    rest, tensors = dict(own), {}
    metric = (own["geometry"] or {}).get("metric")
    if isinstance(metric, Mapping) and isinstance(metric.get("factors"), Mapping):
        tensors["factors"] = dict(metric["factors"])
        without = {key: value for key, value in metric.items() if key != "factors"}
        rest["geometry"] = {**own["geometry"], "metric": without}
    mean = (own["probe"] or {}).get("mean")
    if mean is not None:
        # Zeros stand for a mean that has not begun, and would have the same effect.
        zeros = {str(i): torch.zeros_like(p) for i, p in enumerate(parameters) if i not in mean}
        tensors["mean"] = {str(i): tensor for i, tensor in mean.items()} | zeros
        rest["probe"] = {**own["probe"], "mean": list(mean)}
    return rest, tensors


def _joined(rest: Mapping[str, Any], tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """The inverse of `_large_tensors`; a part that was saved with its tensors in it stays as it is."""
    own = dict(rest)
    if "factors" in tensors and "factors" not in own["geometry"]["metric"]:
        metric = {**own["geometry"]["metric"], "factors": tensors["factors"]}
        own["geometry"] = {**own["geometry"], "metric": metric}
    if "mean" in tensors and isinstance(own["probe"]["mean"], list):
        own["probe"] = {**own["probe"], "mean": {i: tensors["mean"][str(i)] for i in own["probe"]["mean"]}}
    return own


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


def check_base(saved: int, found: int) -> None:
    """Whether the base optimizer's momenta have got lost: what a fresh one lacks, raw checkpoints are not read for."""
    if found < saved:
        raise ValueError(
            f"state_dict: the base optimizer's state of {saved - found} parameters is missing; for a fresh optimizer, "
            "call its make_state() before torch.distributed.checkpoint loads into its state_dict()"
        )

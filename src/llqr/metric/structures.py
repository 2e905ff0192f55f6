"""The structures by name, and which of them each block gets. A new structure is one more class in the table."""

import fnmatch
from collections.abc import Mapping
from dataclasses import replace

from llqr.caller_warnings import warn
from llqr.metric.channel_ekfac import ChannelEKFAC
from llqr.metric.dense import Dense
from llqr.metric.diag_kfac import DiagKFAC
from llqr.metric.diagonal import Diagonal
from llqr.metric.ekfac import EKFAC, PositiveEKFAC
from llqr.metric.identity import Identity
from llqr.metric.kfac import KFAC, PositiveKFAC
from llqr.metric.layout import Block
from llqr.metric.one_sided_ekfac import OneSidedEKFAC
from llqr.metric.scalar import Scalar
from llqr.metric.structure import Structure, widened

MATRICES = KFAC, PositiveKFAC, EKFAC, PositiveEKFAC, OneSidedEKFAC, ChannelEKFAC, DiagKFAC, Dense
STRUCTURES: dict[str, type[Structure]] = {kind.name: kind for kind in (Identity, Scalar, Diagonal, *MATRICES)}

#: Below the 4608 of a ResNet's deepest convolutions, which would cost more than all of its other layers and gained
#: nothing by a basis for that side. A factor of this side takes 64 MiB in float32.
MAX_SIDE = 4096

StructureSpec = str | Mapping[str, str]


def plain_name(name: str) -> str:
    """The name without what `torch.compile(part)` puts between a part and its parameters."""
    return name.replace("_orig_mod.", "")


def requested(block: Block, spec: StructureSpec) -> str:
    """The structure that the user asked for; a vector or a large block may get another one."""
    for pattern, kind in _rules(spec).items():
        if _matches(block, pattern):
            return kind
    raise ValueError(f"structure: no pattern matches parameter {block.parameter!r}; add a '*' rule")


def _rules(spec: StructureSpec) -> Mapping[str, str]:
    return {"*": spec} if isinstance(spec, str) else spec


def _matches(block: Block, pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in (block.parameter, plain_name(block.parameter)))


def structure_names(blocks: list[Block], spec: StructureSpec, max_side: int = MAX_SIDE) -> dict[str, str]:
    """Block name -> structure name, after overrides, the rule for vectors, and the size limit."""
    if not isinstance(spec, str | Mapping):
        raise TypeError(f"structure: expected a name, or patterns -> names, got {spec!r}")
    for pattern, kind in _rules(spec).items():
        if kind not in STRUCTURES:
            known = ", ".join(sorted(STRUCTURES))
            raise ValueError(f"structure: unknown structure {kind!r} for {pattern!r}; choose one of {known}")
        if not any(_matches(block, pattern) for block in blocks):
            raise ValueError(f"structure: the pattern {pattern!r} matches no parameter")
    chosen: dict[str, str] = {}
    cheapened: dict[str, list[str]] = {}
    for block in blocks:
        kind = fitting = requested(block, spec)
        if not (block.is_matrix or STRUCTURES[kind].takes_vectors):
            kind = fitting = "diagonal"
        while (cheaper := STRUCTURES[fitting].fallback) and STRUCTURES[fitting].longest_side(block) > max_side:
            fitting = cheaper
        if fitting != kind:
            cheapened.setdefault(f"{kind} -> {fitting}", []).append(f"{block.name} {block.shape}")
        chosen[block.name] = fitting
    for change, names in cheapened.items():
        warn(f"max_side={max_side}: {change} for {', '.join(names)}")
    return chosen


def groups_of(blocks: list[Block], spec: StructureSpec, kinds: Mapping[str, str]) -> list[Structure]:
    """Group blocks by structure, dtype of the factors and device, and by the structure's own key.

    A vector that gets a diagonal beside a structure of matrices is clipped on its own, as in the authors' code: there
    the scale and the bias of a BatchNorm are one unit only if all of `U` is diagonal. So are the parameters of a layer
    that have different dtypes or devices.
    """
    gathered: dict[tuple[object, ...], list[Block]] = {}
    places: dict[tuple[str, str], set[object]] = {}  # of a layer: one in several groups has no number in common
    for block in blocks:
        place = widened(block.dtype), block.device
        places.setdefault((kinds[block.name], block.layer), set()).add(place)
    for block in blocks:
        kind = kinds[block.name]
        key = kind, STRUCTURES[kind].group_key(block), widened(block.dtype), block.device
        alone = not (block.is_matrix or STRUCTURES[requested(block, spec)].takes_vectors)
        alone = alone or len(places[kind, block.layer]) > 1
        gathered.setdefault(key, []).append(replace(block, layer=block.name) if alone else block)
    return [STRUCTURES[str(key[0])](members) for key, members in gathered.items()]

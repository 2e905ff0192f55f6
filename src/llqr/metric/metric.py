"""The learned inverse metric `U`: groups of blocks, their factors, and how gradients pass through them."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from llqr.metric.layout import Block, Packed, assembled, blocks_of, copy_each, dot, quick_dot
from llqr.metric.structure import Bounds, Factors, Structure
from llqr.metric.structures import MAX_SIDE, StructureSpec, groups_of, plain_name, structure_names

if TYPE_CHECKING:
    from llqr.cuda import Branches

T = TypeVar("T")
Named = dict[str, Tensor]


class Placement:
    """Where the blocks are: here all of them are on every rank. `llqr.distributed.placement` shares them out.

    Gradients have names of parameters. Vectors of a metric that is shared out have the names of a rank's own blocks.
    """

    #: Among how many ranks one copy of the metric is shared out.
    shards = 1

    def to_owner(self, named: Mapping[str, Tensor]) -> Named:
        """The part of a gradient that this rank's metric acts on. All ranks have the same gradient."""
        return dict(named)

    def to_local(self, own: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Named:
        """The parts of all owners, as this rank needs them in a step: for the parameters of `like`, in its layout."""
        return dict(own)

    def total(self, numbers: Tensor) -> Tensor:
        """The sum over the owners of what each has for its own blocks; to the last bit the same on all ranks."""
        return numbers

    def listed(self, names: Sequence[str], rows: Tensor) -> tuple[list[str], Tensor]:
        """One row per name of this rank's metric -> the rows of all owners, with the parameter each belongs to."""
        return list(names), rows


class Metric:
    """A structured, positive inverse metric `U`, the identity until learned.

    Args:
        model: owns the parameters; consulted for the kind of layer a parameter belongs to.
        parameters: name -> tensor, the parameters `U` acts on (default: all that require a gradient). Tensors on the
            meta device are fine for planning.
        structure: one name of `STRUCTURES` for all blocks, or patterns -> names, first match wins:
            `{"head.*": "diagonal", "*": "e-kfac"}`.
        bounds: `(u_min, u_max)` that the spectrum of `U` is kept in, with `u_min <= 1 <= u_max`.
        dtype: what factors are held in (default: the parameter's, at least float32).
        apply_dtype: what the matrix products of `U g` are computed in (default: what the factors are held in).
        max_side: blocks with a factor side above this fall back to a cheaper structure, with a warning.

    Attributes:
        groups: the blocks by structure and shape; every group has its factors, and a vector its packed tensor.
        placement: where the blocks are, if there are several ranks.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> metric = Metric(model, structure="kfac")
        >>> metric.apply({"weight": torch.ones(2, 3)})["weight"].equal(torch.ones(2, 3))
        True
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, Tensor] | None = None,
        structure: StructureSpec = "diagonal",
        *,
        bounds: Bounds = None,
        dtype: torch.dtype | None = None,
        apply_dtype: torch.dtype | None = None,
        max_side: int = MAX_SIDE,
    ) -> None:
        if bounds is not None and not (isinstance(bounds, tuple | list) and len(bounds) == 2):
            raise TypeError(f"bounds: expected a pair (u_min, u_max), got {bounds!r}")
        if bounds is not None and not 0 < bounds[0] <= 1 <= bounds[1]:
            raise ValueError(f"bounds: need 0 < u_min <= 1 <= u_max so that the identity is inside, got {bounds}")
        for argument, value in (("dtype", dtype), ("apply_dtype", apply_dtype)):
            if value not in (None, torch.bfloat16, torch.float32, torch.float64):
                raise ValueError(
                    f"{argument}: expected bfloat16, float32 or float64, which gradients fit in, got {value}"
                )
        if parameters is None:
            parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.bounds = bounds
        self.dtype = dtype
        self.apply_dtype = apply_dtype
        self.blocks: list[Block] = blocks_of(model, parameters)
        self.kinds = structure_names(self.blocks, structure, max_side)
        self.groups: list[Structure] = groups_of(self.blocks, structure, self.kinds)
        for group in self.groups:
            if bounds is not None and type(group).project is Structure.project:
                group.project({}, *bounds)  # refuses, now rather than at the first refresh
        self.placement = Placement()
        self._whole: Metric | None = None
        self._factors: list[Factors] | None = None
        self._cast: list[Factors] | None = None

    def part(self, names: Collection[str], placement: Placement) -> Metric:
        """The metric of these blocks alone, each of which is a parameter under its own name.

        Its `placement` says where the other blocks are, and `whole` is this metric, which need not hold any factors.
        """
        part = copy.copy(self)
        part.placement, part._whole = placement, self
        part._factors = part._cast = None
        part.groups = []
        for group in self.groups:
            own = [replace(block, parameter=block.name, rows=None) for block in group.blocks if block.name in names]
            if own:
                part.groups.append(type(group)(own))
        part.blocks = [block for group in part.groups for block in group.blocks]
        part.kinds = {block.name: self.kinds[block.name] for block in part.blocks}
        return part

    @property
    def whole(self) -> Metric:
        """The metric that this is a part of; this one unless it is a rank's part."""
        return self if self._whole is None else self._whole

    @property
    def learned(self) -> bool:
        """Whether `U` has been learned; until then it is the identity."""
        return self._factors is not None

    def follow(self, parameters: Mapping[str, Tensor]) -> None:
        """Move to the device of the parameters until `U` is learned; raise if they move after that.

        Accelerate, for one, moves a model after its optimizer was made.
        """
        places = {(parameter.device, parameter.dtype) for parameter in parameters.values()}
        if places == {(block.device, block.dtype) for block in self.whole.blocks}:
            return
        devices = {device for device, _ in places}
        if len(devices) == 1 and not self.learned and self.whole is self:
            (device,) = devices
            self.blocks = [replace(b, device=device) for b in self.blocks]
            self.groups = [type(group)([replace(b, device=device) for b in group.blocks]) for group in self.groups]
        for block in self.whole.blocks:
            now = parameters[block.parameter]
            if (now.device, now.dtype) != (block.device, block.dtype):
                raise RuntimeError(
                    f"model: {block.parameter!r} moved from {block.device}, {block.dtype} to {now.device}, "
                    f"{now.dtype}; make the geometry after moving the model"
                )

    # -- factors -----------------------------------------------------------------------------------------------------

    def factors(self) -> list[Factors]:
        """The factors of every group (new identities before the first refresh)."""
        if self._factors is not None:
            return self._factors
        return [group.identity(self.dtype or group.dtype, group.device) for group in self.groups]

    def average(self, learned: Sequence[Factors], ema: float) -> list[Factors]:
        """`F <- ema F + (1 - ema) F_T`, factor by factor; does not change the metric."""
        pairs = zip(self.factors(), learned, strict=True)
        return [{name: new[name].lerp(old[name].to(new[name].dtype), ema) for name in old} for old, new in pairs]

    def constrain(self, factors: Sequence[Factors]) -> list[Factors]:
        """These factors kept inside the bounds, in the dtypes of the metric's own."""
        kept = [group.constrain(own, self.bounds) for group, own in zip(self.groups, factors, strict=True)]
        pairs = zip(self.factors(), kept, strict=True)
        return [{name: new[name].to(old[name].dtype) for name in old} for old, new in pairs]

    def normalised(self, factors: Sequence[Factors], g: Mapping[str, Tensor]) -> list[Factors]:
        """The factors of a multiple of `U` for which `g.Ug = g.g`; unchanged if `g.Ug` is not positive.

        Blocks that are left as they are have it already.
        """
        learned = [block for group in self.groups if group.shapes() for block in group.blocks]
        Ug, names = self.apply(g, factors), dict.fromkeys(block.parameter for block in learned)
        own = [g[name] for name in names]
        ratio = self.dot(own, own) / self.dot(own, [Ug[name] for name in names])
        number = torch.where(torch.isfinite(ratio) & (ratio > 0), ratio, 1.0)
        return [group.times(own, number) for group, own in zip(self.groups, factors, strict=True)]

    def check_scalable(self) -> None:
        """Refuse a structure that `normalised` could not scale, before anything is learned."""
        for group in self.whole.groups:
            if type(group).times is Structure.times and group.scales_with is None:
                group.times({}, torch.ones(()))

    def assign(self, factors: Sequence[Factors]) -> None:
        """Make these the factors of `U`."""
        self._factors = [dict(group) for group in factors]
        self._cast = None

    def named_factors(self) -> dict[str, Tensor]:
        """The factors under names such as `0.weight/in`, one block at a time."""
        pairs = zip(self.groups, self.factors(), strict=True)
        return {name: f for group, own in pairs for name, f in group.named(group.reordered(own, to_memory=False))}

    # -- the action of U ---------------------------------------------------------------------------------------------

    def apply(self, grads: Mapping[str, Tensor], factors: Sequence[Factors] | None = None) -> Named:
        """`U g` for the parameters given by name; those the metric does not know pass unchanged.

        `factors` replace the metric's own, to try a candidate before it is assigned.
        """
        if factors is None:
            if self._factors is None:
                return dict(grads)
            self._cast = factors = self._cast or self.apply_factors()
        pieces: Named = {}
        for group, own in zip(self.groups, factors, strict=True):
            if own and not grads.keys().isdisjoint(group.parameters):
                with _own_precision(group.device):
                    Ug = group.apply_each(own, [_piece(block, grads) for block in group.blocks])
                pieces |= zip(group.names, Ug, strict=True)
        return dict(grads) | assembled(self.blocks, pieces, grads)

    def apply_packed(
        self, packed: Packed, factors: Sequence[Factors], like: Mapping[str, Tensor], branches: Branches | None
    ) -> Named:
        """`U g` of a packed gradient, in the dtypes and layouts of `like`; groups side by side, if there are branches.

        `packed` is in the dtype of the factors.
        """
        dtypes = {g.dtype for g in like.values()}
        dtype = dtypes.pop() if len(dtypes) == 1 else None

        def applied(group: Structure, own: Factors, g: Tensor) -> Tensor:
            # Converted at once, if possible: converting each block would be one kernel launch per block.
            Ug = group.apply(own, g)
            return Ug if dtype is None else Ug.to(dtype)

        each = [partial(applied, *part) for part in zip(self.groups, factors, packed, strict=True)]
        sizes = [group.stored() for group in self.groups]
        with _own_precision(packed[0].device):
            Ug = [compute() for compute in each] if branches is None else branches.run(each, sizes)
        return self.unpack(Ug, like)

    def apply_factors(self) -> list[Factors]:
        """The factors in the dtype `U g` is computed in; only matrix products gain from a narrower `apply_dtype`."""
        dtype = self.apply_dtype
        return [
            {name: factor.to(dtype) for name, factor in own.items()} if dtype and group.multiplies else own
            for group, own in zip(self.groups, self.factors(), strict=True)
        ]

    def pack(self, grads: Mapping[str, Tensor]) -> Packed:
        """Gradients by name -> one packed tensor per group, in the dtype the factors are learned in."""
        packed = [group.blank(group.dtype, group.device) for group in self.groups]
        views = [view for group, tensor in zip(self.groups, packed, strict=True) for view in group.unpack(tensor)]
        copy_each(views, [_piece(block, grads) for group in self.groups for block in group.blocks])
        return packed

    def unpack(self, packed: Packed, like: Mapping[str, Tensor]) -> Named:
        """The inverse of `pack`, in the dtypes of `like`."""
        pieces: Named = {}
        for group, own in zip(self.groups, packed, strict=True):
            pieces |= zip(group.names, group.unpack(own), strict=True)
        return assembled(self.blocks, pieces, like)

    # -- inner products over all blocks, those of other ranks included -------------------------------------------------

    def dot(self, a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
        """Accumulated in float64."""
        return self.placement.total(dot(a, b))

    def quick_dot(self, a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
        """In the precision of the terms."""
        return self.placement.total(quick_dot(a, b))

    # -- size and state ----------------------------------------------------------------------------------------------

    def memory(self) -> dict[str, int]:
        """Bytes of the factors per structure, `total`, and `allocated` (0 until learned); allocates nothing."""
        planned: dict[str, int] = {}
        for group in self.groups:
            planned[group.name] = planned.get(group.name, 0) + group.stored() * (self.dtype or group.dtype).itemsize
        allocated = sum(f.nbytes for group in self._factors or [] for f in group.values())
        return planned | {"total": sum(planned.values()), "allocated": allocated}

    def stored(self) -> int:
        """Stored scalars (the paper's storage table counts these)."""
        return sum(group.stored() for group in self.groups)

    def state_dict(self) -> dict[str, Any]:
        """The same names whether or not `U` has been learned; of a rank's part, those of its own blocks."""
        kinds, factors = _plain_names(self.whole.kinds), _plain_names(self.named_factors())
        return {"kinds": kinds, "learned": self.learned, "factors": factors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Strict: refuses other blocks, structures or shapes, and says what differs."""
        kinds = _plain_names(self.whole.kinds)
        if state["kinds"] != kinds:
            differing = sorted({name for name, _ in state["kinds"].items() ^ kinds.items()})
            raise ValueError(f"state_dict: the saved metric differs in the structure of {', '.join(differing[:5])}")
        if not state["learned"]:
            self._factors = self._cast = None
            return
        fresh = [{name: torch.empty_like(factor) for name, factor in own.items()} for own in self.factors()]
        pairs = list(zip(self.groups, fresh, strict=True))
        views = {name: view for group, own in pairs for name, view in group.named(own)}
        for name, view in _plain_names(views).items():
            saved = state["factors"].get(name)
            if saved is None:
                raise ValueError(
                    f"state_dict: factor {name!r} is missing; every rank's state has the blocks that it owns, which "
                    "torch.distributed.checkpoint puts together (without full_state_dict)"
                )
            if saved.shape != view.shape:
                raise ValueError(
                    f"state_dict: factor {name!r} is of shape {tuple(saved.shape)}, expected shape {tuple(view.shape)}"
                )
            view.copy_(saved)
            if not view.isfinite().all():
                raise ValueError(f"state_dict: factor {name!r} is not finite")
        self.assign([group.reordered(own, to_memory=True) for group, own in pairs])


def _piece(block: Block, grads: Mapping[str, Tensor]) -> Tensor:
    if block.parameter in grads:
        return block.piece(grads[block.parameter])
    return torch.zeros(block.native, dtype=block.dtype, device=block.device)


def _own_precision(device: torch.device) -> AbstractContextManager[Any]:
    """The caller's autocast does not reach the metric, which chooses its own dtype."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def _plain_names(named: Mapping[str, T]) -> dict[str, T]:
    """A state has the same names whether or not parts of the model are compiled."""
    return {plain_name(name): value for name, value in named.items()}

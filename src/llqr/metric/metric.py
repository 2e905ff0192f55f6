"""The learned inverse metric `U`: groups of blocks, their factors, and how gradients pass through them."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from llqr.distributed.assembled import assembled
from llqr.distributed.placement import Placement
from llqr.metric.block import Block
from llqr.metric.copying import copy_each
from llqr.metric.layout import (
    MAX_SIDE,
    StructureSpec,
    blocks_of,
    factor_dtype,
    groups_of,
    plain_name,
    structure_names,
)
from llqr.metric.packed import Packed, dot, quick_dot
from llqr.metric.structure import Bounds, Factors, Structure

if TYPE_CHECKING:
    from llqr.cuda import Branches

T = TypeVar("T")


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
            if value is not None and not value.is_floating_point:
                raise ValueError(f"{argument}: a metric is made of floating-point numbers, got {value}")
        if parameters is None:
            parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.bounds = bounds
        self.dtype = dtype
        self.apply_dtype = apply_dtype
        self.blocks: list[Block] = blocks_of(model, parameters)
        self.kinds = structure_names(self.blocks, structure, max_side)
        self.groups: list[Structure] = groups_of(self.blocks, structure, self.kinds)
        for group in self.groups:
            if bounds is not None and type(group).constrain is Structure.constrain:
                group.constrain({}, bounds)  # refuses, now rather than at the first refresh
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

    def move_to(self, device: torch.device) -> None:
        """Follow a model that has moved as a whole; before anything is learned."""
        assert not self.learned
        self.blocks = [replace(block, device=device) for block in self.blocks]
        self.groups = [type(group)([replace(block, device=device) for block in group.blocks]) for group in self.groups]

    @property
    def whole(self) -> Metric:
        """The metric that this is a part of; this one unless it is a rank's part."""
        return self if self._whole is None else self._whole

    @property
    def learned(self) -> bool:
        """Whether `U` has been learned; until then it is the identity."""
        return self._factors is not None

    def learnable(self) -> set[str]:
        """The parameters that there are factors for; the structure "identity" has none."""
        return {block.parameter for group in self.groups if group.shapes() for block in group.blocks}

    # -- factors -----------------------------------------------------------------------------------------------------

    def factors(self) -> list[Factors]:
        """The factors of every group (new identities before the first refresh)."""
        if self._factors is not None:
            return self._factors
        return [
            group.identity(factor_dtype(group.blocks[0], self.dtype), group.blocks[0].device) for group in self.groups
        ]

    def average(self, learned: Sequence[Factors], ema: float) -> list[Factors]:
        """`F <- ema F + (1 - ema) F_T`, factor by factor; does not change the metric."""
        pairs = zip(self.factors(), learned, strict=True)
        return [{name: new[name].lerp(old[name].to(new[name].dtype), ema) for name in old} for old, new in pairs]

    def constrain(self, factors: Sequence[Factors]) -> list[Factors]:
        """These factors kept inside the bounds, in the dtypes of the metric's own."""
        kept = [group.constrain(own, self.bounds) for group, own in zip(self.groups, factors, strict=True)]
        pairs = zip(self.factors(), kept, strict=True)
        return [{name: new[name].to(old[name].dtype) for name in old} for old, new in pairs]

    def normalised(self, factors: Sequence[Factors], gradients: Sequence[Mapping[str, Tensor]]) -> list[Factors]:
        """The factors of a multiple of `U` for which `g.Ug = g.g` on average over these gradients.

        Unchanged if `g.Ug` is not positive on average.
        """
        names = dict.fromkeys(block.parameter for block in self.blocks)
        squares, along = [], []
        for g in gradients:
            Ug, own = self.apply(g, factors), [g[name] for name in names]
            along.append(self.dot(own, [Ug[name] for name in names]))
            squares.append(self.dot(own, own))
        ratio = torch.stack(squares).sum() / torch.stack(along).sum()
        number = torch.where(torch.isfinite(ratio) & (ratio > 0), ratio, 1.0)
        return [group.times(own, number) for group, own in zip(self.groups, factors, strict=True)]

    def check_scalable(self) -> None:
        """Refuse a structure that `normalised` could not scale, before anything is learned."""
        for group in self.whole.groups:
            if type(group).times is Structure.times and not group.linear_in:
                group.times({}, torch.ones(()))

    def assign(self, factors: Sequence[Factors]) -> None:
        """Make these the factors of `U`."""
        self._factors = [dict(group) for group in factors]
        self._cast = None

    def named_factors(self) -> dict[str, Tensor]:
        """Views of the factors under names such as `0.weight/in`, one block at a time."""
        return self._named(self.factors())

    def _named(self, factors: Sequence[Factors]) -> dict[str, Tensor]:
        pairs = zip(self.groups, factors, strict=True)
        return {name: factor for group, own in pairs for name, factor in group.named(own)}

    # -- the action of U ---------------------------------------------------------------------------------------------

    def apply(self, grads: Mapping[str, Tensor], factors: Sequence[Factors] | None = None) -> dict[str, Tensor]:
        """`U g` for the parameters given by name; those the metric does not know pass unchanged.

        `factors` replace the metric's own, to try a candidate before it is assigned.
        """
        if factors is None:
            if not self.learned:
                return dict(grads)
            self._cast = self._cast or self.apply_factors()
            factors = self._cast
        else:
            factors = [group.for_inbox(own) for group, own in zip(self.groups, factors, strict=True)]
        Ug: dict[str, Tensor] = {}
        for group, own in zip(self.groups, factors, strict=True):
            if not own or not any(block.parameter in grads for block in group.blocks):
                continue
            with torch.autocast(group.blocks[0].device.type, enabled=False):  # the metric chooses its own dtype
                applied = group.apply_pieces(own, self._pieces(group, grads), self._dtype_of_apply(group, own))
            Ug |= {block.name: piece for block, piece in zip(group.blocks, applied, strict=True)}
        return dict(grads) | assembled(self.blocks, Ug, grads)

    def inboxes(self, factors: Sequence[Factors]) -> Packed:
        """Uninitialised memory for gradients, in the dtypes in which these factors multiply them."""
        pairs = zip(self.groups, factors, strict=True)
        return [group.inbox(self._dtype_of_apply(group, own), group.blocks[0].device) for group, own in pairs]

    def apply_inboxes(
        self,
        factors: Sequence[Factors],
        inboxes: Packed,
        like: Mapping[str, Tensor],
        branches: Branches | None = None,
    ) -> dict[str, Tensor]:
        """`U g` for gradients of all parameters in `inboxes`, in the dtypes and memory order of `like`.

        With branches, groups are computed side by side.
        """
        parts = zip(self.groups, factors, inboxes, strict=True)
        each = [partial(self._apply_inbox, *part) for part in parts]
        sizes = [group.stored() for group in self.groups]
        applied = branches.run(each, sizes) if branches else [compute() for compute in each]
        blocks = [block for group in self.groups for block in group.blocks]
        pieces = [piece for own in applied for piece in own]
        return assembled(self.blocks, {block.name: piece for block, piece in zip(blocks, pieces, strict=True)}, like)

    def _apply_inbox(self, group: Structure, own: Factors, inbox: Tensor) -> list[Tensor]:
        with torch.autocast(inbox.device.type, enabled=False):
            return group.apply_inbox(own, inbox, group.blocks[0].dtype)

    def _dtype_of_apply(self, group: Structure, own: Factors) -> torch.dtype:
        return next(iter(own.values())).dtype if own else group.blocks[0].dtype

    def pack(self, grads: Mapping[str, Tensor]) -> Packed:
        """Gradients by name -> one packed tensor per group, in the dtype the factors are learned in."""
        packed = [group.blank(self.learning_dtype(group), group.blocks[0].device) for group in self.groups]
        pieces = [piece for group in self.groups for piece in self._pieces(group, grads)]
        views = [view for group, tensor in zip(self.groups, packed, strict=True) for view in group.unpack(tensor)]
        copy_each(views, pieces)
        return packed

    def unpack(self, packed: Packed, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `pack`, in the dtypes of `like`."""
        pieces = {
            block.name: piece
            for group, stack in zip(self.groups, packed, strict=True)
            for block, piece in zip(group.blocks, group.unpack(stack), strict=True)
        }
        return assembled(self.blocks, pieces, like)

    def learning_dtype(self, group: Structure) -> torch.dtype:
        """Factors are learned in at least float32, whatever they are held in."""
        return factor_dtype(group.blocks[0], None)

    def _pieces(self, group: Structure, grads: Mapping[str, Tensor]) -> list[Tensor]:
        """The blocks' parts of the gradients; zeros where there is none."""
        return [
            block.piece(grads[block.parameter])
            if block.parameter in grads
            else torch.zeros(block.native, dtype=block.dtype, device=block.device)
            for block in group.blocks
        ]

    def apply_factors(self) -> list[Factors]:
        """The factors in the dtype `U g` is computed in, and in the order of the gradient's memory.

        Only matrix products gain from a narrower `apply_dtype`.
        """
        held = self.factors()
        if self.apply_dtype is not None:
            held = [
                {name: factor.to(self.apply_dtype) for name, factor in own.items()} if group.multiplies else own
                for group, own in zip(self.groups, held, strict=True)
            ]
        return [group.for_inbox(own) for group, own in zip(self.groups, held, strict=True)]

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
            width = factor_dtype(group.blocks[0], self.dtype).itemsize
            planned[group.name] = planned.get(group.name, 0) + group.stored() * width
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
        saved_kinds, kinds = _plain_names(state["kinds"]), _plain_names(self.whole.kinds)
        if saved_kinds != kinds:
            theirs, ours = set(saved_kinds.items()), set(kinds.items())
            differing = sorted({name for name, _ in theirs ^ ours})
            raise ValueError(f"state_dict: the saved metric differs in the structure of {', '.join(differing[:5])}")
        if not state.get("learned", state["factors"] is not None):  # states had no factors then, and no such entry
            self._factors = self._cast = None
            return
        fresh = [{name: factor.clone() for name, factor in group.items()} for group in self.factors()]
        saved_factors = _plain_names(state["factors"])
        for name, view in _plain_names(self._named(fresh)).items():
            saved = saved_factors.get(name)
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
        self.assign(fresh)


def _plain_names(named: Mapping[str, T]) -> dict[str, T]:
    """As in the model without compiled parts, so that states go from one with them to one without, and back."""
    return {plain_name(name): value for name, value in named.items()}

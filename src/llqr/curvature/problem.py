"""A model, a loss and one batch, frozen: a function from parameters to outputs that leaves no trace in the model."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from llqr.curvature.attached import holders, places, reattach
from llqr.curvature.uncompiled import uncompiled
from llqr.curvature.whole_weights import fsdp_set_aside
from llqr.curvature.writes import Writes
from llqr.dtensors import whole
from llqr.leaves import leaves_of
from llqr.random_state import TorchRandomState

T = TypeVar("T")
Forward = Callable[[nn.Module, Any], Any]
Loss = Callable[[Tensor, Any], Tensor]
Batch = tuple[Any, Any] | Mapping[str, Any]

#: Where the targets are looked for in a batch that is a mapping, in this order: next to "labels", "target" is an
#: input of a sequence model.
TARGET_KEYS = ("targets", "labels", "target", "label", "y")
#: Stands for the inputs among the names of what a model writes to.
INPUTS = "inputs"
#: Outputs that differ by less (relative) are the same: low precision rounds them, and kernels depend on the batch size.
ROUNDING = 0.05


class Problem:
    """`theta -> outputs` and `outputs -> mean loss` on one batch.

    The model runs in eval mode (running normalisation statistics, no dropout), on copies of its buffers, and the random
    state is put back, so that nothing of it changes. With `micro_batch` the outputs are computed in pieces. Sharded
    weights (FSDP2) are gathered, on all ranks at the same time. A model that draws random numbers draws the same ones
    whenever it is called.

    Attributes:
        written: the model's parameters that it writes to, and of which it gets copies; see `find_writes`. `INPUTS`
            stands for its inputs.
        replaced: the parameters whose `.data` it assigns to.
        keeps_outputs: whether the outputs whose loss is asked for are kept, as `seen`, and what outputs depended on.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Loss,
        batch: Batch,
        parameters: Mapping[str, Tensor],
        *,
        forward: Forward | None = None,
        micro_batch: int | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.loss_fn = loss_fn
        self.inputs, self.targets = split_batch(batch)
        self.parameters = {name: self.taken(parameter.detach()) for name, parameter in parameters.items()}
        self._micro_batch = micro_batch
        self.pieces = self._cut()
        self._autocast = autocast
        self._caller = _Caller(model, forward or call_model)
        learned = {f"model.{name}" for name in parameters}
        self._held = {n: self.taken(p.detach()) for n, p in self._caller.named_parameters() if n not in learned}
        self._buffers = dict(self._caller.named_buffers())
        self._random = _random_state(self.parameters)
        self.written: frozenset[str] = frozenset()
        self.replaced: list[str] = []
        self.keeps_outputs = False
        self.seen: Tensor | None = None
        self._leaves: set[Tensor] = set()
        self._places = places(self._caller)
        self._holders = holders(self._caller)

    def taken(self, parameter: Tensor) -> Tensor:
        """The tensor that outputs are a function of: the parameter, gathered if the model is sharded."""
        return whole(parameter)

    def fixed_tensors(self) -> list[Tensor]:
        """The model's tensors that are not learned but that outputs depend on: other parameters, and buffers."""
        return [*self._held.values(), *self._buffers.values()]

    def other_tensors(self) -> list[Tensor]:
        """Every tensor besides the learned parameters that outputs and loss depend on, the batch last."""
        return [*self.fixed_tensors(), *tensors_of((self.inputs, self.targets))]

    @property
    def constants(self) -> Any:
        """What a batch holds besides tensors."""
        leaves, structure = pytree.tree_flatten((self.inputs, self.targets))
        return structure, [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def at(self, parameters: Mapping[str, Tensor], others: Sequence[Tensor]) -> Problem:
        """The same problem with other tensors, given in the order of `other_tensors`."""
        moved = copy.copy(self)
        rest = iter(others)
        moved.parameters = dict(parameters)
        moved._held = {name: next(rest) for name in self._held}
        moved._buffers = {name: next(rest) for name in self._buffers}
        moved.inputs, moved.targets = pytree.tree_map_only(Tensor, lambda _: next(rest), (self.inputs, self.targets))
        moved.pieces = moved._cut()
        return moved

    def _cut(self) -> list[Any]:
        return [self.inputs] if self._micro_batch is None else _split(self.inputs, self._micro_batch)

    @property
    def precision(self) -> torch.dtype:
        """The coarsest dtype the network computes in."""
        dtypes = {parameter.dtype for parameter in self.parameters.values()}
        return max(dtypes | ({self._autocast} if self._autocast else set()), key=lambda dtype: torch.finfo(dtype).eps)

    def outputs(self, parameters: Mapping[str, Tensor], inputs: Any, *, plain: bool = True) -> Tensor:
        """The network's outputs for one piece of the inputs, as a function of the parameters.

        `plain` runs what is compiled as it was written: compiled code has first derivatives only.
        """
        tensors = self._named(parameters)
        tensors |= {name: tensors[name].clone() for name in self.written & tensors.keys()}
        if INPUTS in self.written:
            inputs = pytree.tree_map_only(Tensor, torch.clone, inputs)
        outputs = self._outputs(tensors, inputs, plain=plain)
        if self.keeps_outputs:
            self._leaves |= leaves_of(outputs) or set()
        return outputs

    def _named(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """These parameters and the ones that are not learned, by their names in `_caller`."""
        return {f"model.{name}": parameter for name, parameter in parameters.items()} | self._held

    def _outputs(self, tensors: Mapping[str, Tensor], inputs: Any, *, plain: bool) -> Tensor:
        # Copies, because a custom module may write to its buffers even in eval mode.
        tensors = {**tensors, **{name: buffer.clone() for name, buffer in self._buffers.items()}}
        replaced = {place: tensors[name] for place, name in self._places.items()}
        if self._random is not None:
            self._random.restore()
        before = [dict(held) for held in self._holders]
        try:
            with fsdp_set_aside(self._caller), uncompiled() if plain else nullcontext():
                return self.called(inputs, replaced)
        finally:
            reattach(self._holders, before)

    @torch.no_grad()
    def find_writes(self) -> None:
        """Call the model once, to find out which of its parameters it writes to, and put these back."""
        tensors = {name: tensor.detach() for name, tensor in self._named(self.parameters).items()}
        inputs = {f"{INPUTS}.{i}": tensor for i, tensor in enumerate(tensors_of(self.pieces[0]))}
        writes = Writes(tensors | inputs)
        try:
            with uncompiled(), writes:
                self._outputs(tensors, self.pieces[0], plain=True)
        finally:
            writes.undo()
        self.written = frozenset(INPUTS if name in inputs else name for name in writes.names)
        self.replaced = [name.removeprefix("model.") for name in writes.replaced if name in tensors]

    @torch.no_grad()
    def mixes_samples(self) -> bool:
        """Whether the outputs of a sample depend on those before it in the batch, so that pieces are not the whole.

        A sample is computed behind the first samples of the batch, and behind its last ones.
        """
        rows, size = samples_in(self.inputs) or 0, max(2, self._micro_batch or 0)
        if len(self.pieces) == 1 or rows < size:
            return False
        orders = (range(size), (*range(rows - size + 1, rows), size - 1))
        ahead, behind = (
            self.outputs(self.parameters, taken_rows(self.inputs, torch.tensor(list(order)))) for order in orders
        )
        if ahead.shape != behind.shape or not ahead.ndim or ahead.shape[0] % size:
            return False  # it cannot be told
        own = ahead.shape[0] // size
        difference, whole = (ahead[-own:] - behind[-own:]).double().norm(), ahead[-own:].double().norm()
        return bool(difference > ROUNDING * whole)

    def called(self, inputs: Any, replaced: Mapping[str, Tensor] | None = None) -> Tensor:
        """The model's outputs, with some of its tensors replaced, as at least float32."""
        device = next(iter(self.parameters.values())).device
        with torch.autocast(device.type, self._autocast, enabled=self._autocast is not None):
            if replaced is None:
                outputs = self._caller(inputs)
            else:
                outputs = torch.func.functional_call(self._caller, dict(replaced), (inputs,), tie_weights=False)
        if not isinstance(outputs, Tensor):
            raise TypeError(
                f"forward: expected a tensor of outputs, got {type(outputs).__name__}; give the geometry a "
                "forward=lambda model, inputs: ..., which returns what loss_fn takes"
            )
        return outputs.float() if outputs.dtype.itemsize < 4 else outputs

    def bypassed(self) -> list[str]:
        """The parameters that the model did not read from its modules, so that the values given for them had no effect.

        Their gradient would be zero. Only known where outputs were kept.
        """
        names = {id(tensor): name for name, tensor in self._caller.named_parameters()}
        found = (names.get(id(leaf), "").removeprefix("model.") for leaf in self._leaves)
        return sorted(name for name in found if name in self.parameters)

    def loss(self, outputs: Tensor) -> Tensor:
        """The mean loss as a function of all outputs. It is differentiated twice, and so runs as it was written."""
        if self.keeps_outputs:
            self.seen = outputs.detach()
        with uncompiled():
            loss = self.loss_fn(outputs, self.targets)
        if not isinstance(loss, Tensor) or loss.ndim != 0:
            raise ValueError("loss_fn: expected one number, the mean loss over the batch")
        return loss

    def terms(self, outputs: Tensor) -> Tensor:
        """How many terms the mean loss averages: targets that are not ignored, or the batch size."""
        # A target for every output is no class: several labels per sample may be whole numbers, or as well floats.
        of_outputs = isinstance(self.targets, Tensor) and self.targets.shape == outputs.shape
        counted = counted_terms(self.loss_fn, self.targets)
        if counted is not None and (hasattr(self.loss_fn, "terms") or not of_outputs):
            return counted.to(outputs.dtype)
        rows = outputs.shape[0] if outputs.ndim else 1
        return torch.full((), float(rows), dtype=outputs.dtype, device=outputs.device)


def _random_state(parameters: Mapping[str, Tensor]) -> TorchRandomState | None:
    """None inside a CUDA graph, which has its own."""
    on_cuda = any(parameter.is_cuda for parameter in parameters.values())
    return None if on_cuda and torch.cuda.is_current_stream_capturing() else TorchRandomState(parameters.values())


class _Caller(nn.Module):
    """Lets `functional_call` go through a user's `forward(model, inputs)`."""

    def __init__(self, model: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.model = model
        self._call = forward

    def forward(self, inputs: Any) -> Any:
        return self._call(self.model, inputs)


def call_model(model: nn.Module, inputs: Any) -> Any:
    """`model(inputs)`, with mappings and tuples spread out, and `.logits` taken from objects that have it."""
    named: Mapping[str, Any] = inputs if isinstance(inputs, Mapping) else {}
    listed: Sequence[Any] = inputs if isinstance(inputs, tuple | list) else () if inputs is named else (inputs,)
    try:
        outputs = model(*listed, **named)
    except TypeError as error:
        if _takes(model, listed, named):
            raise
        raise TypeError(
            f"batch: its inputs do not fit {type(model).__name__}.forward ({error}); give the geometry a "
            "forward=lambda model, inputs: ..., which calls the model"
        ) from error
    except ValueError as error:
        if not named:
            raise
        raise ValueError(
            f"batch: {type(model).__name__} cannot be called on {', '.join(named)} ({error}); the targets are not "
            "among its inputs, so that an encoder-decoder needs decoder_input_ids beside them, or a forward="
        ) from error
    return getattr(outputs, "logits", outputs)


def _takes(model: nn.Module, listed: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Whether the model has arguments for these inputs, so that a type error is one of its own."""
    try:
        inspect.signature(model.forward).bind(*listed, **named)
    except TypeError:
        return False
    return True


def split_batch(batch: Batch) -> tuple[Any, Any]:
    """A batch as (inputs, targets)."""
    if isinstance(batch, Mapping):
        for key in TARGET_KEYS:
            if key in batch:
                return {name: value for name, value in batch.items() if name != key}, batch[key]
        raise ValueError(f"batch: a mapping needs one of the keys {', '.join(TARGET_KEYS)}, got {', '.join(batch)}")
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    raise TypeError(
        "batch: expected (inputs, targets), a mapping with targets, or a callable that returns one of these"
    )


def tensors_of(batch: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]


def batch_signature(batch: Batch) -> Any:
    """What captured graphs hold fixed: the structure of the batch, and its tensors' shapes, dtypes and devices."""
    leaves, structure = pytree.tree_flatten(batch)
    return structure, [(leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def summed(loss_fn: Loss) -> bool:
    """Whether a loss says that it is a sum: a module's attribute, or a partial's keyword."""
    if isinstance(loss_fn, functools.partial):
        return bool(loss_fn.keywords["reduction"] == "sum" if "reduction" in loss_fn.keywords else summed(loss_fn.func))
    return getattr(loss_fn, "reduction", None) == "sum"


def counted_terms(loss_fn: Loss, targets: Any) -> Tensor | None:
    """How many targets a mean loss is taken over, where it tells by them; None if every sample is a term."""
    counted: Callable[[Any], Tensor] | None = getattr(loss_fn, "terms", None)
    if counted is not None:
        return counted(targets)
    if isinstance(targets, Tensor) and not targets.is_floating_point() and not targets.is_complex():
        return (targets != ignore_index(loss_fn)).sum()
    return None


def ignore_index(loss_fn: Loss) -> int:
    """The target a cross-entropy leaves out: a module's attribute, a partial's keyword, or torch's default -100."""
    if isinstance(loss_fn, functools.partial):
        return int(loss_fn.keywords.get("ignore_index", ignore_index(loss_fn.func)))
    return int(getattr(loss_fn, "ignore_index", -100))


@contextmanager
def frozen(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Eval mode and a forked random state, both put back whatever happens."""
    training = [(module, module.training) for module in model.modules()]
    devices = [device] if device.type == "cuda" else []
    try:
        model.eval()
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for module, flag in training:
            module.training = flag


def _split(inputs: Any, size: int) -> list[Any]:
    """Cut every tensor that has the batch dimension into pieces of `size` rows."""
    # Tokenizers return mappings of their own, which are leaves to torch's trees.
    inputs = pytree.tree_map(lambda leaf: dict(leaf) if isinstance(leaf, Mapping) else leaf, inputs)
    rows = samples_in(inputs)
    if not rows:
        raise ValueError("micro_batch: found no tensor with a batch dimension in the inputs")
    return [taken_rows(inputs, slice(start, start + size)) for start in range(0, rows, size)]


def samples_in(batch: Any) -> int | None:
    """How many samples a batch has: the length of its first tensor that has one."""
    return next((len(tensor) for tensor in tensors_of(batch) if tensor.ndim), None)


def taken_rows(batch: T, rows: slice | Tensor) -> T:
    """Some of the samples: every tensor that has the batch dimension is cut."""
    samples = samples_in(batch)

    def cut(tensor: Tensor) -> Tensor:
        return tensor[rows] if tensor.ndim and len(tensor) == samples else tensor

    found: T = pytree.tree_map_only(Tensor, cut, batch)
    return found

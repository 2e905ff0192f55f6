"""A model, a loss and one batch, frozen: a function from parameters to outputs that leaves no trace in the model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from llqr.curvature.attached import holders, noticed_calls, places, reattach
from llqr.curvature.batch import Batch, call_model, pieces_of, split_batch, tensors_of
from llqr.curvature.losses import Loss, counted_terms
from llqr.curvature.uncompiled import uncompiled
from llqr.curvature.whole_weights import fsdp_set_aside
from llqr.curvature.writes import Writes
from llqr.distributed.dtensors import whole
from llqr.leaves import leaves_of
from llqr.random_state import TorchRandomState

Forward = Callable[[nn.Module, Any], Any]

#: Stands for the inputs among the names of what a model writes to.
INPUTS = "inputs"


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
        loss_modules: those that the loss calls. It gets copies of their buffers too; see `find_loss_modules`.
        keeps_outputs: whether the outputs whose loss is asked for are kept, as `seen`, and what outputs depended on.
        read_by_loss: the parameters that the loss itself reads from the model, known from then on.
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
        self.read_by_loss: set[str] = set()
        self._places = places(self._caller)
        self._holders = holders(self._caller.modules())
        owner = getattr(loss_fn, "__self__", loss_fn)  # of a method
        self.loss_modules = list(owner.modules()) if isinstance(owner, nn.Module) else []

    def taken(self, parameter: Tensor) -> Tensor:
        """The tensor that outputs are a function of: the parameter, gathered if the model is sharded."""
        return whole(parameter)

    @property
    def loss_modules(self) -> list[nn.Module]:
        return self._loss_modules

    @loss_modules.setter
    def loss_modules(self, modules: list[nn.Module]) -> None:
        self._loss_modules, self._loss_holders = modules, holders(modules)
        self._loss_buffers = {
            (module, name): buffer for module in modules for name, buffer in module.named_buffers(recurse=False)
        }

    def weights(self) -> list[Tensor]:
        """The model's tensors that outputs depend on: the learned parameters, then other parameters and buffers."""
        return [*self.parameters.values(), *self._held.values(), *self._buffers.values()]

    def tensors(self) -> list[Tensor]:
        """Every tensor that outputs and loss depend on: the weights, the buffers of the loss, then the batch."""
        return [*self.weights(), *self._loss_buffers.values(), *tensors_of((self.inputs, self.targets))]

    @property
    def constants(self) -> Any:
        """What a batch holds besides tensors."""
        leaves, structure = pytree.tree_flatten((self.inputs, self.targets))
        return structure, [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def at(self, tensors: Sequence[Tensor]) -> Problem:
        """The same problem with other tensors, given in the order of `tensors`; what is left out at the end stays."""
        moved = copy.copy(self)
        rest = iter([*tensors, *self.tensors()[len(tensors) :]])
        moved.parameters = {name: next(rest) for name in self.parameters}
        moved._held = {name: next(rest) for name in self._held}
        moved._buffers = {name: next(rest) for name in self._buffers}
        moved._loss_buffers = {place: next(rest) for place in self._loss_buffers}
        moved.inputs, moved.targets = pytree.tree_map_only(Tensor, lambda _: next(rest), (self.inputs, self.targets))
        moved.pieces = moved._cut()
        return moved

    def _cut(self) -> list[Any]:
        return [self.inputs] if self._micro_batch is None else pieces_of(self.inputs, self._micro_batch)

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
    def find_loss_modules(self) -> None:
        """Call the loss once, to find out which modules it calls, such as a teacher, or one that keeps statistics."""
        if getattr(self.loss_fn, "__module__", "").startswith("torch."):
            return
        outputs = [self.outputs(self.parameters, piece) for piece in self.pieces]
        whole_batch = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        with torch.enable_grad(), self.loss_on_copies(), noticed_calls() as called:
            self.loss(whole_batch.requires_grad_())
        self.loss_modules = list(dict.fromkeys([*self.loss_modules, *called]))

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
        return self._names_of(self._leaves)

    def _names_of(self, leaves: Iterable[Tensor]) -> list[str]:
        names = {id(tensor): name for name, tensor in self._caller.named_parameters()}
        found = (names.get(id(leaf), "").removeprefix("model.") for leaf in leaves)
        return sorted(name for name in found if name in self.parameters)

    @contextmanager
    def loss_on_copies(self) -> Iterator[None]:
        """While entered, the modules that the loss calls have copies of their buffers; put back at the end."""
        before = [dict(held) for held in self._loss_holders]
        try:
            for (module, name), buffer in self._loss_buffers.items():
                module._buffers[name] = buffer.clone()
            yield
        finally:
            reattach(self._loss_holders, before)

    def loss(self, outputs: Tensor) -> Tensor:
        """The mean loss as a function of all outputs. It is differentiated twice, and so runs as it was written."""
        if self.keeps_outputs:
            self.seen = outputs.detach()
        with uncompiled(), self.loss_on_copies():
            try:
                loss = self.loss_fn(outputs, self.targets)
            except RuntimeError as error:
                if "leaf Variable" not in str(error):
                    raise
                loss = self.loss_fn(outputs.clone(), self.targets)  # it writes to them, which training lets it do
        if not isinstance(loss, Tensor) or loss.ndim != 0:
            raise ValueError("loss_fn: expected one number, the mean loss over the batch")
        if self.keeps_outputs:
            self.read_by_loss |= set(self._names_of(leaves_of(loss) or ()))
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


@contextmanager
def frozen(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Eval mode, a forked random state and no cached parametrizations, all put back whatever happens.

    The flags alone: a module's own `eval` may do more than can be put back, such as merge what it trains into a weight.
    """
    training = [(module, module.training) for module in model.modules()]
    cached = parametrize._cache_enabled  # of the caller's: what is computed here are functions of other weights
    devices = [device] if device.type == "cuda" else []
    try:
        parametrize._cache_enabled = 0
        for module, _ in training:
            module.training = False
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        parametrize._cache_enabled = cached
        for module, flag in training:
            module.training = flag

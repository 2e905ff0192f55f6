"""A model, a loss and one batch as a function of the weights, which leaves the model as it was."""

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from llqr.curvature.batch import Batch, Loss, call_model, pieces_of, split_batch, tensors_of
from llqr.distributed.dtensors import any_sharded, is_sharded, whole

Forward = Callable[[nn.Module, Any], Any]


class Problem:
    """`theta -> outputs` and `outputs -> mean loss` on one batch.

    Used inside `frozen`. The model runs on copies of its buffers and draws the same random numbers of torch whenever it
    is called. States that it keeps elsewhere, or numbers of Python's or numpy's generators, are not protected. With
    `micro_batch` the outputs are computed in `pieces`. Weights that FSDP2 has sharded are gathered, on all ranks at the
    same time.
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
        self.undivided = micro_batch is None
        self.pieces = [self.inputs] if micro_batch is None else pieces_of(self.inputs, micro_batch)
        self.parameters = {name: whole(parameter.detach()) for name, parameter in parameters.items()}
        self._model, self._forward, self._autocast = model, forward or call_model, autocast
        self.device = next(iter(self.parameters.values())).device
        self._constants = {n: whole(p.detach()) for n, p in model.named_parameters() if n not in parameters}
        self._buffers = dict(model.named_buffers())
        self._places = _places(model)
        if any_sharded(parameters.values()):
            self._hold_gathered()
        self._random = _random_state(self.device)

    def _hold_gathered(self) -> None:
        """Let the model have the gathered weights until `frozen` ends: a checkpointed model recomputes with its own.

        They require a gradient, because the recomputed pass must save the same tensors.
        """
        gathered = {name: weight.detach().requires_grad_() for name, weight in self.parameters.items()}
        for held, name, tensor in self._places:
            if is_sharded(held[name]):
                held[name] = gathered[tensor] if tensor in gathered else self._constants[tensor]

    def tensors(self) -> list[Tensor]:
        """Every tensor that outputs and loss depend on: parameters, frozen parameters, buffers, then the batch."""
        weights = [*self.parameters.values(), *self._constants.values(), *self._buffers.values()]
        return [*weights, *tensors_of((self.inputs, self.targets))]

    def at(self, tensors: Sequence[Tensor]) -> Self:
        """The same problem with other tensors, given in the order of `tensors`."""
        moved, rest = copy.copy(self), iter(tensors)
        moved.parameters = {name: next(rest) for name in self.parameters}
        moved._constants = {name: next(rest) for name in self._constants}
        moved._buffers = {name: next(rest) for name in self._buffers}
        moved.inputs, moved.targets = pytree.tree_map_only(Tensor, lambda _: next(rest), (self.inputs, self.targets))
        moved.pieces = [moved.inputs]
        return moved

    @property
    def precision(self) -> torch.dtype:
        """The coarsest dtype the network computes in."""
        dtypes = {parameter.dtype for parameter in self.parameters.values()}
        return max(dtypes | ({self._autocast} if self._autocast else set()), key=lambda dtype: torch.finfo(dtype).eps)

    def outputs(self, parameters: Mapping[str, Tensor], inputs: Any, *, compiled: bool = False) -> Tensor:
        """The network's outputs on one piece of the inputs, as at least float32.

        Compiled code runs eagerly unless `compiled`, because it only has first derivatives.
        """
        # Copies, because a module may write to its buffers even in eval mode.
        buffers = {name: buffer.clone() for name, buffer in self._buffers.items()}
        given = {**self._constants, **parameters, **buffers}
        for generator, state in self._random:
            generator.set_state(state)
        before = [held[name] for held, name, _ in self._places]
        try:
            for held, name, tensor in self._places:
                held[name] = given[tensor]
            with (
                nullcontext() if compiled else _eagerly(),
                torch.autocast(self.device.type, self._autocast, enabled=self._autocast is not None),
            ):
                outputs = self._forward(self._model, inputs)
        finally:
            for (held, name, _), own in zip(self._places, before, strict=True):
                held[name] = own
            torch.clear_autocast_cache()  # of weights that no other pass uses; or it would grow all through a refresh
        if not isinstance(outputs, Tensor):
            raise TypeError(
                f"forward: expected a tensor of outputs, got {type(outputs).__name__}; give the geometry a "
                "forward=lambda model, inputs: ..., which returns what loss_fn takes"
            )
        return outputs.float() if outputs.dtype.itemsize < 4 else outputs

    def outputs_of_pieces(self) -> list[Tensor]:
        """The outputs at the weights of the model, piece by piece."""
        return [self.outputs(self.parameters, piece) for piece in self.pieces]

    def loss(self, outputs: Tensor) -> Tensor:
        """The mean loss as a function of all outputs."""
        with _eagerly():
            loss = self.loss_fn(outputs, self.targets)
        if not isinstance(loss, Tensor) or loss.ndim != 0:
            raise TypeError("loss_fn: expected one number, the mean loss over the batch")
        return loss


def _places(model: nn.Module) -> list[tuple[dict[str, Any], str, str]]:
    """Every place that holds a parameter or a buffer, and the one name of its tensor: tied ones have several places."""
    names = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    return [
        (held, name, names[id(tensor)])
        for module in model.modules()
        for held in (module._parameters, module._buffers)
        for name, tensor in held.items()
        if tensor is not None
    ]


def _random_state(device: torch.device) -> list[tuple[torch.Generator, Tensor]]:
    generators = [torch.default_generator]
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():  # a CUDA graph has its own
            return []
        generators.append(torch.cuda.default_generators[device.index])
    return [(generator, generator.get_state()) for generator in generators]


def _eagerly() -> AbstractContextManager[Any]:
    """While entered, compiled code runs as it was written; nobody has compiled anything before dynamo is imported."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@contextmanager
def frozen(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Eval mode, a forked random state, no hooks of FSDP2 and no fast path; the model is always put back as it was.

    Sets the training flags alone, because `eval` may do more, such as merge what is trained into a frozen weight.
    FSDP2's hooks would gather its own weights in the place of those that a `Problem` gives, and torch's fast path of
    transformers, which only passes without gradients take, sets padded positions to zero. The model's lists and dicts
    are restored too, because forward mode would leave tensors in them that are of no use afterwards.
    """
    modules = list(model.modules())
    held = _containers(modules)
    before: list[Any] = [dict(own) if isinstance(own, dict) else list(own) for own in held]
    sharded, fast = "torch.distributed.fsdp" in sys.modules, torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        if "_original_forward" in vars(model):  # a refresh has a precision of its own, without Accelerate's autocast
            model.forward = vars(model)["_original_forward"]
        for module in modules:
            module.training = False
            for hooks in (module._forward_pre_hooks, module._forward_hooks) if sharded else ():
                for key in [key for key, hook in hooks.items() if _is_fsdps(hook)]:
                    del hooks[key]
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for now, own in zip(held, before, strict=True):
            if not isinstance(now, dict):
                now[:] = own
                continue
            if list(now) != list(own):
                now.clear()
            for key, value in own.items():
                if key not in now or now[key] is not value:  # nothing is written to a dict that refuses it
                    now[key] = value


def _containers(modules: list[nn.Module]) -> list[Any]:
    """The attributes of the modules, and every dict and list inside."""
    found: dict[int, Any] = {id(module.__dict__): module.__dict__ for module in modules}
    waiting = list(found.values())
    while waiting:
        own = waiting.pop()
        for value in own.values() if isinstance(own, dict) else own:
            if isinstance(value, dict | list) and id(value) not in found:
                found[id(value)] = value
                waiting.append(value)
    return list(found.values())


def _is_fsdps(hook: Callable[..., Any]) -> bool:
    return str(getattr(inspect.unwrap(hook), "__module__", "")).startswith("torch.distributed.fsdp.")

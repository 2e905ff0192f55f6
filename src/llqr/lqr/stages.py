"""A network as an ordered list of stages x_{i+1} = f_i(x_i, θ_i), each as a function of one flat vector.

The state x_i is the *whole batch*, flattened: the samples share the parameters, so the value function of the LQR
couples them, and a stage that mixes samples is as exact as one that does not.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.func import functional_call


@dataclass(frozen=True)
class Stage:
    """One stage f_i at its input x_i.

    `shapes` names the trainable parameters θ_i as the module does; frozen parameters are part of the map f_i.
    A state that is not floating point (token indices) has no tangent, so it counts as a state of dimension 0.
    """

    name: str
    module: nn.Module
    inputs: Tensor
    shapes: dict[str, torch.Size]
    point: Tensor
    """z_i = (x_i, θ_i), flattened and concatenated; every derivative is taken here."""

    @property
    def state_dim(self) -> int:
        return state_dim(self.inputs)

    @property
    def parameter_dim(self) -> int:
        return self.point.numel() - self.state_dim

    @property
    def title(self) -> str:
        return f"stage {self.name!r} ({type(self.module).__name__})"

    def __call__(self, z: Tensor) -> Tensor:
        """f_i(x_i, θ_i) for z = (x_i, θ_i), in the shape the module returns."""
        x, theta = z.split_with_sizes([self.state_dim, self.parameter_dim])
        # The copy lets in-place modules, such as ReLU(inplace=True), run without touching z.
        inputs = x.reshape(self.inputs.shape).clone() if self.inputs.is_floating_point() else self.inputs
        outputs = functional_call(self.module, self._local(theta), (inputs,))
        if not isinstance(outputs, Tensor):
            raise TypeError(
                f"{self.title} of `model` returned {type(outputs).__name__}; every stage must map one tensor to one "
                "tensor."
            )
        return outputs

    def unpack(self, theta: Tensor) -> dict[str, Tensor]:
        """A flat vector over θ_i as tensors, under their names in the whole network."""
        return {f"{self.name}.{local}": value for local, value in self._local(theta).items()}

    def pack(self, values: Mapping[str, Tensor]) -> Tensor:
        """The inverse of `unpack`; reads only the entries of this stage."""
        flat = [values[f"{self.name}.{local}"].reshape(-1) for local in self.shapes]
        return torch.cat(flat) if flat else self.point.new_zeros(0)

    def _local(self, theta: Tensor) -> dict[str, Tensor]:
        pieces = theta.split_with_sizes([prod(shape) for shape in self.shapes.values()]) if self.shapes else ()
        return {name: piece.reshape(shape) for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)}


def state_dim(x: Tensor) -> int:
    return x.numel() if x.is_floating_point() else 0


def run_stages(model: nn.Sequential | Iterable[nn.Module], inputs: Tensor) -> tuple[list[Stage], Tensor]:
    """Run the network once; returns its stages, each with its input, and the output x_N."""
    modules = _named_modules(model)
    dtype = _common_dtype(modules)
    stages: list[Stage] = []
    x = inputs.detach()
    for name, module in modules:
        trainable = {local: p.detach() for local, p in module.named_parameters() if p.requires_grad}
        state = x.reshape(-1) if x.is_floating_point() else x.new_zeros(0, dtype=dtype)
        if state.dtype != dtype:
            raise ValueError(
                f"The state entering stage {name!r} of `model` is {state.dtype}, its parameters are {dtype}."
            )
        point = torch.cat([state, *(value.reshape(-1) for value in trainable.values())])
        stage = Stage(name, module, x, {local: value.shape for local, value in trainable.items()}, point)
        x = stage(point)
        stages.append(stage)
    return stages, x


def _named_modules(model: nn.Sequential | Iterable[nn.Module]) -> list[tuple[str, nn.Module]]:
    lists = nn.Sequential, nn.ModuleList
    if isinstance(model, lists) and type(model).forward in [kind.forward for kind in lists]:
        # Not named_children(), which drops the second use of a module: a shared activation is two stages.
        named = [(n, m) for n, m in model.named_modules(remove_duplicate=False) if n and "." not in n]
    elif isinstance(model, nn.Module) or not isinstance(model, Iterable):
        raise TypeError(f"`model` must be an nn.Sequential or a list of stages, got {type(model).__name__}.")
    else:
        named = [(str(index), module) for index, module in enumerate(model)]
    if not named:
        raise ValueError("`model` has no stages.")
    for name, module in named:
        if not isinstance(module, nn.Module):
            raise TypeError(f"Stage {name!r} of `model` is {type(module).__name__}, not an nn.Module.")
        if any(part.training for part in module.modules()):
            raise ValueError(
                f"Stage {name!r} ({type(module).__name__}) of `model` is in training mode, where dropout and batch "
                "statistics are not a fixed map f_i; call model.eval() first."
            )
    _refuse_tied(named)
    return named


def _refuse_tied(named: list[tuple[str, nn.Module]]) -> None:
    owner: dict[nn.Parameter, str] = {}
    for name, module in named:
        for local, parameter in module.named_parameters():
            full = f"{name}.{local}"
            if parameter.requires_grad and parameter in owner:
                raise ValueError(
                    f"Parameters {owner[parameter]!r} and {full!r} of `model` are tied across stages; the layerwise "
                    "LQR needs every θ_i to enter one stage only."
                )
            owner[parameter] = full


def _common_dtype(named: list[tuple[str, nn.Module]]) -> torch.dtype:
    dtypes = {p.dtype for _, module in named for p in module.parameters() if p.requires_grad}
    if not dtypes:
        raise ValueError("`model` has no trainable parameters.")
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.float64}:
        found = ", ".join(sorted(map(str, dtypes)))
        wanted = "must share one real floating dtype, float32 or float64"
        raise ValueError(f"The trainable parameters of `model` {wanted}, found {found}.")
    return dtypes.pop()

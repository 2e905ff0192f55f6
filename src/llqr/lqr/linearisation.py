"""The linearised dynamics δx_{i+1} = A_i δx_i + B_i δθ_i, and the costates that propagate the loss backwards."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import grad, jacrev

from llqr.lqr.stages import Stage, run_stages, state_dim

LossFunction = Callable[[Tensor, Tensor], Tensor]

DEFAULT_MAX_DIMENSION = 4096


@dataclass(frozen=True)
class LinearStage:
    """A_i = ∂f_i/∂x_i, B_i = ∂f_i/∂θ_i and the costate λ_{i+1} = ∂L/∂x_{i+1} of one stage."""

    stage: Stage
    A: Tensor
    B: Tensor
    costate: Tensor

    @property
    def gradient(self) -> Tensor:
        """∇_{θ_i} L = B_i^T λ_{i+1}, flat."""
        return self.B.mT @ self.costate


@dataclass(frozen=True)
class Linearisation:
    """A network, a loss and a batch, linearised stage by stage at the current weights."""

    stages: tuple[LinearStage, ...]
    outputs: Tensor
    loss: Tensor
    loss_of_state: Callable[[Tensor], Tensor]
    """ℓ as a function of the flat output x_N."""

    @property
    def output_gradient(self) -> Tensor:
        """∇_{x_N} ℓ, which is the last costate λ_N."""
        return self.stages[-1].costate

    @property
    def gradient(self) -> dict[str, Tensor]:
        """∇_θ L per parameter, from the costates."""
        return {name: g for linear in self.stages for name, g in linear.stage.unpack(linear.gradient).items()}


def linearise(
    model: nn.Sequential | Iterable[nn.Module],
    loss_fn: LossFunction,
    batch: tuple[Tensor, Tensor],
    *,
    max_dimension: int = DEFAULT_MAX_DIMENSION,
) -> Linearisation:
    """Linearise `model` on `batch` = (inputs, targets): A_i and B_i by autodiff, λ_i = A_i^T λ_{i+1} from λ_N = ∇ℓ.

    `model` is an nn.Sequential or a list of stages, in eval mode; it is not modified. `loss_fn(x_N, targets)` returns a
    scalar. Matrices are dense, so a stage whose state and parameters together exceed `max_dimension` is refused before
    anything large is allocated.

    >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double().eval()
    >>> x, y = torch.randn(5, 3).double(), torch.tensor([0, 1, 0, 1, 1])
    >>> linear = linearise(model, nn.functional.cross_entropy, (x, y))
    >>> [tuple(stage.A.shape) for stage in linear.stages]
    [(20, 15), (20, 20), (10, 20)]
    >>> [tuple(stage.B.shape) for stage in linear.stages]
    [(20, 16), (20, 0), (10, 10)]
    >>> list(linear.gradient)
    ['0.weight', '0.bias', '2.weight', '2.bias']
    """
    inputs, targets = _unpack_batch(batch)
    # The derivatives below come from torch.func, which works under no_grad; no outer graph is needed.
    with torch.no_grad():
        stages, outputs = run_stages(model, inputs)
        if not outputs.is_floating_point():
            raise ValueError(f"The last stage of `model` must return a floating-point tensor, got {outputs.dtype}.")
        _refuse_large(stages, outputs, max_dimension)

        def loss_of_state(x: Tensor) -> Tensor:
            return loss_fn(x.reshape(outputs.shape), targets)

        costate, loss = _loss_gradient(loss_of_state, outputs.reshape(-1))
        after = outputs
        linear: list[LinearStage] = []
        for stage in reversed(stages):
            A, B = _jacobians(stage, after)
            linear.append(LinearStage(stage, A, B, costate))
            costate = A.mT @ costate
            after = stage.inputs
    return Linearisation(tuple(reversed(linear)), outputs, loss, loss_of_state)


def _jacobians(stage: Stage, after: Tensor) -> tuple[Tensor, Tensor]:
    """(A_i, B_i); `after` is x_{i+1} of the forward pass, which a stage that draws random numbers will not match."""
    rows, columns = state_dim(after), stage.point.numel()
    if rows and columns:

        def flat(z: Tensor) -> tuple[Tensor, Tensor]:
            outputs = stage(z)
            return outputs.reshape(-1), outputs

        jacobian, again = jacrev(flat, has_aux=True)(stage.point)
        if not torch.allclose(again, after, atol=1e-5, equal_nan=True):
            raise ValueError(f"{stage.title} of `model` is not a fixed map f_i: one input gave two different outputs.")
    else:
        jacobian = stage.point.new_zeros(rows, columns)
    A, B = jacobian.split_with_sizes([stage.state_dim, stage.parameter_dim], dim=1)
    return A, B


def _loss_gradient(loss_of_state: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    loss = loss_of_state(x)
    if not isinstance(loss, Tensor) or loss.ndim != 0:
        raise ValueError("`loss_fn` must return a scalar tensor, such as the mean loss over the batch.")
    if not bool(torch.isfinite(loss)):
        raise ValueError(f"`loss_fn` returned {float(loss)} on this batch; the quadratic model needs a finite loss.")
    gradient: Tensor = grad(loss_of_state)(x)
    return gradient, loss


def _unpack_batch(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    if not isinstance(batch, tuple | list) or len(batch) != 2 or not isinstance(batch[0], Tensor):
        raise TypeError("`batch` must be a pair (inputs, targets) whose inputs are a tensor.")
    inputs, targets = batch
    return inputs, targets.detach() if isinstance(targets, Tensor) else targets


def _refuse_large(stages: list[Stage], outputs: Tensor, max_dimension: int) -> None:
    sizes = [(stage.title, stage.state_dim, stage.parameter_dim) for stage in stages]
    sizes.append(("the output", outputs.numel(), 0))
    for title, states, parameters in sizes:
        if states + parameters > max_dimension:
            raise ValueError(
                f"The problem is too large for the exact LQR: {title} has a batch state of dimension {states} and "
                f"{parameters} parameters, together above max_dimension={max_dimension}; use a smaller batch or "
                "network, or raise `max_dimension` (memory grows with its square, time with its cube)."
            )

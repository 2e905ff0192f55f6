"""Small networks, batches and closures that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import llqr
from geometries import flat_geometry

Batch = tuple[Tensor, Tensor]
cross_entropy = nn.functional.cross_entropy


def mlp(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def batches(count: int, size: int = 16, features: int = 5, dtype: torch.dtype = torch.float32) -> list[Batch]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, features, generator=draw).to(dtype), torch.randint(3, (size,), generator=draw))
        for _ in range(count)
    ]


def closure_of(opt: torch.optim.Optimizer, model: Callable[[Tensor], Tensor], batch: Batch) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        opt.zero_grad()
        loss = cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        return loss

    return closure


def sgd(model: nn.Module, **settings: float) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **({"lr": 0.1, "momentum": 0.9} | settings))


def quick_geometry(model: nn.Module, structure: str = "diagonal", **settings: object) -> llqr.Geometry:
    """A geometry whose metric visibly differs from the identity after a few inner steps."""
    fast = {"every": 3, "steps": 5, "lr": 1e-2, "ema": 0.5, "engine": "double-backward"}  # needs no tracing
    return flat_geometry(model, cross_entropy, structure=structure, **(fast | settings))


def train(opt: llqr.Optimizer, model: nn.Module, data: list[Batch]) -> list[Tensor]:
    return [opt.step(closure_of(opt, model, batch), batch=batch) for batch in data]


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, copied."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert tensor.dtype == expected[name].dtype
        assert tensor.equal(expected[name]), f"{name} differs by {(tensor - expected[name]).abs().max()}"


def assert_same_state(actual: object, expected: object, path: str = "state") -> None:
    """Nested state dictionaries, bit for bit."""
    assert type(actual) is type(expected), path
    if isinstance(actual, dict):
        assert actual.keys() == expected.keys(), path
        for key, value in actual.items():
            assert_same_state(value, expected[key], f"{path}[{key!r}]")
    elif isinstance(actual, list | tuple):
        assert len(actual) == len(expected), path
        for i, pair in enumerate(zip(actual, expected, strict=True)):
            assert_same_state(*pair, f"{path}[{i}]")
    elif isinstance(actual, Tensor):
        assert actual.dtype == expected.dtype, path
        assert actual.equal(expected), path
    else:
        assert actual == expected, path


def sam_by_hand(model: nn.Module, base: torch.optim.Optimizer, batch: Batch, rho: float) -> Tensor:
    """One SAM step written out plainly; returns the loss at the centre."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    loss = cross_entropy(model(batch[0]), batch[1])
    g = torch.autograd.grad(loss, parameters)
    norm = torch.sqrt(sum((part.double() ** 2).sum() for part in g) + 1e-12)
    centre = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for p, part in zip(parameters, g, strict=True):
            p += rho * part / norm.to(p.dtype)
    there = torch.autograd.grad(cross_entropy(model(batch[0]), batch[1]), parameters)
    with torch.no_grad():
        for p, c, part in zip(parameters, centre, there, strict=True):
            p.copy_(c)
            p.grad = part
    base.step()
    return loss.detach()

"""Side by side with `pytorch_optimizer` 4.1.0: the same trajectories where its definitions coincide with ours.

Its `step(closure)` expects the centre's gradients to be there already, so its loop calls the closure once before.
"""

from collections.abc import Callable

import pytest
import pytorch_optimizer
import torch
from torch import Tensor, nn

import llqr
from traps.training import Batch, batches, closure_of, mlp, train, weights

BASES = {
    "sgdm": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
}
FOREACH = [False, True]


def their_run(make: Callable[..., torch.optim.Optimizer], model: nn.Module, data: list[Batch]) -> None:
    opt = make(model)
    for batch in data:
        closure = closure_of(opt, model, batch)
        closure()
        opt.step(closure)


def assert_same_trajectory(
    ours: Callable[[nn.Module], llqr.Optimizer],
    theirs: Callable[[nn.Module], torch.optim.Optimizer],
    network: Callable[[], nn.Module] = lambda: mlp(torch.float64),
    **close: float,
) -> dict[str, Tensor]:
    data = batches(8, dtype=torch.float64)
    model, peer = network(), network()
    train(ours(model), model, data)
    their_run(theirs, peer, data)
    torch.testing.assert_close(weights(model), weights(peer), **({"rtol": 1e-6, "atol": 1e-8} | close))
    return weights(model)


@pytest.mark.parametrize("foreach", FOREACH)
@pytest.mark.parametrize("base", BASES)
def test_sam(base, foreach):
    """`eps = rho g / |g|` in both.

    They add 1e-12 to the norm where we add it under the root, and they round the norm to float32 in a float64 model:
    hence a tolerance of float32's order although everything else is float64.
    """
    kind, settings = BASES[base]
    ends = assert_same_trajectory(
        lambda m: llqr.SAM(kind(m.parameters(), **settings), rho=0.3),
        lambda m: pytorch_optimizer.SAM(m.parameters(), kind, rho=0.3, foreach=foreach, **settings),
    )
    plain = mlp(torch.float64)
    train(llqr.Optimizer(kind(plain.parameters(), **settings)), plain, batches(8, dtype=torch.float64))
    assert max((ends[n] - w).abs().max() for n, w in weights(plain).items()) > 1e-3, "the probe must matter here"


def test_sam_agrees_on_the_norm_once_theirs_is_not_rounded(monkeypatch):
    """The rounding of their norm is the whole difference: undo it and the trajectories agree to float64."""

    def exact(groups, device=None, *, weight_adaptive=False):
        return sum(p.grad.square().sum() for group in groups for p in group["params"]).reshape(1)

    monkeypatch.setattr("pytorch_optimizer.optimizer.sam.get_global_gradient_norm", exact)
    kind, settings = BASES["sgdm"]
    assert_same_trajectory(
        lambda m: llqr.SAM(kind(m.parameters(), **settings), rho=0.3),
        lambda m: pytorch_optimizer.SAM(m.parameters(), kind, rho=0.3, **settings),
        rtol=1e-12,
        atol=1e-14,
    )


class WithoutBiases(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(5, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False))
        self.double()


@pytest.mark.parametrize("foreach", FOREACH)
@pytest.mark.parametrize("base", BASES)
def test_asam(base, foreach):
    """Theirs has `T = |w|` for every parameter; ours is the published `T = |w| + eta`, and 1 for biases.

    So: eta = 0, and a model without biases.
    """
    kind, settings = BASES[base]
    assert_same_trajectory(
        lambda m: llqr.ASAM(kind(m.parameters(), **settings), rho=0.5, eta=0.0),
        lambda m: pytorch_optimizer.SAM(m.parameters(), kind, rho=0.5, adaptive=True, foreach=foreach, **settings),
        WithoutBiases,
    )


def test_asam_treats_biases_differently():
    """On a model with biases the two must part, or the test above would prove nothing about `T`."""
    kind, settings = BASES["sgdm"]
    with pytest.raises(AssertionError):
        assert_same_trajectory(
            lambda m: llqr.ASAM(kind(m.parameters(), **settings), rho=0.5, eta=0.0),
            lambda m: pytorch_optimizer.SAM(m.parameters(), kind, rho=0.5, adaptive=True, **settings),
        )


@pytest.mark.parametrize("foreach", FOREACH)
@pytest.mark.parametrize("base", BASES)
def test_friendly_sam(base, foreach):
    """Theirs (sigma = 1) starts `gbar` at the first gradient, ours at 0, as the paper writes it.

    The first displacement is along `g` in both; after it our mean is `(1 - lam) g`. So our mean is set to theirs after
    the first step, and from there on all must agree.
    """
    kind, settings = BASES[base]
    data = batches(8, dtype=torch.float64)
    model, peer = mlp(torch.float64), mlp(torch.float64)
    opt = llqr.FriendlySAM(kind(model.parameters(), **settings), rho=0.3, lam=0.8)
    train(opt, model, data[:1])
    for mean in opt.probe.state_dict(list(model.parameters()))["mean"].values():
        mean /= 1 - 0.8
    train(opt, model, data[1:])
    their_run(
        lambda m: pytorch_optimizer.FriendlySAM(m.parameters(), kind, rho=0.3, lmbda=0.8, foreach=foreach, **settings),
        peer,
        data,
    )
    torch.testing.assert_close(weights(model), weights(peer), rtol=1e-6, atol=1e-8)


def test_friendly_sam_with_lam_zero_needs_no_adaptation():
    """With lam = 0 the mean is the last gradient in both, from the first step on."""
    kind, settings = BASES["sgdm"]
    assert_same_trajectory(
        lambda m: llqr.FriendlySAM(kind(m.parameters(), **settings), rho=0.3, lam=0.0),
        lambda m: pytorch_optimizer.FriendlySAM(m.parameters(), kind, rho=0.3, lmbda=0.0, **settings),
    )

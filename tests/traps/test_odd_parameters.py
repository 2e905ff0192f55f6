"""Frozen, unused, tied, sparse, complex, mixed-dtype and 0-d parameters: supported, or refused by name."""

import pytest
import torch
from torch import nn

import llqr
from geometries import flat_geometry

from .training import assert_same_bits, batches, closure_of, cross_entropy, mlp, quick_geometry, sgd, train, weights

PROBES = [llqr.SAM, llqr.ASAM, llqr.FisherSAM, llqr.FriendlySAM]


def both_ways(make, model: nn.Module) -> list[llqr.Optimizer]:
    """A probe alone, and the same probe with a metric."""
    return [make(sgd(model), 0.05), make(sgd(model), 0.05, geometry=quick_geometry(model, "kfac"))]


@pytest.mark.parametrize("make", PROBES)
def test_frozen_parameters_do_not_change(make):
    model = mlp()
    model[0].requires_grad_(False)
    frozen = {name: p.clone() for name, p in model[0].named_parameters()}
    for opt in both_ways(make, model):
        before = model[2].weight.detach().clone()
        train(opt, model, batches(2))
        assert_same_bits(dict(model[0].named_parameters()), frozen)
        assert not model[2].weight.equal(before)


def test_a_parameter_may_be_unfrozen_during_a_run():
    model, data = mlp(), batches(4)
    model[0].requires_grad_(False)
    opt = llqr.FriendlySAM(sgd(model), rho=0.05, geometry=quick_geometry(model))
    train(opt, model, data[:2])
    before = model[0].weight.detach().clone()
    model[0].requires_grad_(True)
    train(opt, model, data[2:])
    assert not model[0].weight.equal(before)


@pytest.mark.parametrize("make", PROBES)
def test_unused_parameters(make):
    model = mlp()
    model.add_module("spare", nn.Linear(3, 3))
    call = nn.Sequential(*list(model)[:3])
    spare = {name: p.detach().clone() for name, p in model.spare.named_parameters()}
    geometry = flat_geometry(
        model, cross_entropy, structure="kfac", steps=3, engine="double-backward", forward=lambda m, x: call(x)
    )
    for learned in ({}, {"geometry": geometry}):
        opt = make(sgd(model, weight_decay=0.5), 0.05, **learned)
        for batch in batches(2):
            opt.step(closure_of(opt, call, batch), batch=batch)
        assert_same_bits({n: p.detach() for n, p in model.spare.named_parameters()}, spare)


class Tied(nn.Module):
    """Embedding and output share one matrix, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.hidden, self.head = nn.Embedding(3, 4), nn.Linear(4, 4), nn.Linear(4, 3, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(self.embed(tokens)).tanh())


@pytest.mark.parametrize("make", PROBES)
def test_tied_parameters_stay_tied_and_move_once(make):
    draw = torch.Generator().manual_seed(0)
    batch = torch.randint(3, (8,), generator=draw), torch.randint(3, (8,), generator=draw)
    model = Tied()
    for opt in both_ways(make, model):
        before = weights(model)
        opt.step(closure_of(opt, model, batch), batch=batch)
        assert model.head.weight is model.embed.weight
        assert not model.embed.weight.equal(before["embed.weight"])
    assert opt.geometry.metric.blocks[0].name == "embed.weight"
    assert len(opt.geometry.metric.blocks) == 3


def test_the_displacement_of_tied_parameters_counts_them_once():
    batch = torch.tensor([0, 1, 2]), torch.tensor([2, 0, 1])
    model = Tied().double()
    opt = llqr.SAM(sgd(model), rho=0.25)
    closure_of(opt, model, batch)()
    before = [p.detach().clone() for p in model.parameters()]
    opt.first_step()
    moved = torch.cat([(p - b).flatten() for p, b in zip(model.parameters(), before, strict=True)])
    assert moved.norm().item() == pytest.approx(0.25, rel=1e-6)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.EmbeddingBag(9, 4, sparse=True), nn.Linear(4, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(tokens))


SPARSE_BATCH = torch.tensor([[0, 1], [2, 3]]), torch.tensor([0, 1])


@pytest.mark.parametrize("make", PROBES)
def test_sparse_gradients_are_refused_by_name(make):
    model = Sparse()
    before = weights(model)
    opt = make(torch.optim.SGD(model.parameters(), lr=0.1), 0.05, model=model)
    with pytest.raises(TypeError, match=r"'table\.weight' has a sparse gradient.*sparse=False"):
        opt.step(closure_of(opt, model, SPARSE_BATCH))
    assert_same_bits(weights(model), before)


def test_sparse_gradients_are_refused_by_shape_where_there_is_no_module():
    spare, dense, table = (nn.Parameter(torch.ones(3, 2)) for _ in range(3))
    opt = llqr.SAM(torch.optim.SGD([spare, dense, table], lr=0.1), rho=0.05)

    def closure():
        opt.zero_grad()
        loss = (dense.sum() * nn.functional.embedding(torch.tensor([0, 1]), table, sparse=True)).sum()
        loss.backward()
        return loss

    with pytest.raises(TypeError, match=r"one of shape \(3, 2\) has a sparse gradient"):
        opt.step(closure)


def test_sparse_gradients_are_left_to_the_base_without_probe_and_metric():
    plain, wrapped = Sparse(), Sparse()
    base = torch.optim.SGD(plain.parameters(), lr=0.1)
    opt = llqr.Optimizer(torch.optim.SGD(wrapped.parameters(), lr=0.1))
    for _ in range(3):
        closure_of(base, plain, SPARSE_BATCH)()
        base.step()

        opt.step(closure_of(opt, wrapped, SPARSE_BATCH))
    assert_same_bits(weights(wrapped), weights(plain))


def test_complex_parameters_are_refused_by_name():
    model = nn.Linear(5, 3, dtype=torch.complex64)
    opt = llqr.SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.05, model=model)
    before = weights(model)

    def closure():
        opt.zero_grad()
        loss = model(torch.ones(2, 5, dtype=torch.complex64)).abs().sum()
        loss.backward()
        return loss

    with pytest.raises(TypeError, match="'weight' has a complex gradient"):
        opt.step(closure)
    assert_same_bits(weights(model), before)
    with pytest.raises(ValueError, match=r"'weight' is complex"):
        flat_geometry(model, cross_entropy)


class Mixed(nn.Module):
    """bfloat16 first, then float32, then float64: each parameter moves at its own precision."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.low = nn.Linear(5, 4, dtype=torch.bfloat16)
        self.mid = nn.Linear(4, 4)
        self.high = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.high(self.mid(self.low(x.bfloat16()).float()).tanh().double())


@pytest.mark.parametrize("make", PROBES)
def test_mixed_dtypes(make):
    model, data = Mixed(), batches(3)
    for opt in both_ways(make, model):
        before = weights(model)
        train(opt, model, data)
        for name, w in weights(model).items():
            assert w.dtype == before[name].dtype
            assert w.isfinite().all()
            assert not w.equal(before[name])


def test_the_radius_is_not_rounded_to_another_parameters_precision():
    model, (batch,) = Mixed(), batches(1)
    opt = llqr.SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.1)
    closure_of(opt, model, batch)()
    before = model.high.weight.detach().clone()
    g = model.high.weight.grad.clone()
    norm = torch.sqrt(sum(p.grad.double().square().sum() for p in model.parameters()))
    opt.first_step()
    torch.testing.assert_close(model.high.weight.detach() - before, 0.1 * g / norm, rtol=1e-6, atol=0)


class Scaled(nn.Module):
    """A temperature: a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.temperature = mlp(), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * self.temperature


@pytest.mark.parametrize("structure", ["scalar", "diagonal", "kfac", "e-kfac", "diag-kfac", "dense"])
@pytest.mark.parametrize("make", PROBES)
def test_parameters_without_dimensions(make, structure):
    model = Scaled()
    before = model.temperature.item()
    opt = make(sgd(model), 0.05, geometry=quick_geometry(model, structure))
    train(opt, model, batches(2))
    assert model.temperature.shape == ()
    assert model.temperature.item() != before


def test_an_empty_parameter():
    model, data = mlp(), batches(2)
    model.register_parameter("nothing", nn.Parameter(torch.zeros(0, 4)))
    spared = model.forward

    def forward(x):
        return spared(x) + model.nothing.sum()

    for opt in (llqr.SAM(sgd(model), rho=0.05), llqr.ASAM(sgd(model), rho=0.5)):
        for batch in data:
            opt.step(closure_of(opt, forward, batch))
    assert all(p.isfinite().all() for p in model.parameters())


def test_gradients_of_zero_leave_the_probe_at_the_centre():
    model, (batch,) = mlp(), batches(1)
    for make in PROBES:
        opt = make(sgd(model, lr=0.1), 0.05)
        before = weights(model)
        places = []

        def closure(opt=opt, places=places):
            opt.zero_grad()
            places.append(weights(model))
            loss = 0.0 * model(batch[0]).sum()
            loss.backward()
            return loss

        opt.step(closure)
        assert_same_bits(places[1], before)
        assert_same_bits(weights(model), before)

"""Two processes under DDP: weights and metrics stay equal; the probe is shared, or each rank's own."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import llqr
from processes import on_ranks

from .training import Batch, batches, closure_of, cross_entropy, mlp, quick_geometry, sgd, train, weights

RANKS = 2
CASES = {
    "sam": {},
    "fsam": {},
    "llqr+sam": {"structure": "kfac"},
    "own sam": {"own": True},
    "own llqr+sam": {"structure": "diagonal", "own": True},
}


def optimizer(case: str, model: nn.Module, ddp: nn.Module) -> llqr.Optimizer:
    """The method of a case; `own` makes the probe each rank's own."""
    options = CASES[case]
    settings: dict = {"rho": 0.5}
    if "structure" in options:
        settings["geometry"] = quick_geometry(ddp, options["structure"])
    if "own" in options:
        settings["no_sync"] = ddp.no_sync
    return llqr.build(case.split()[-1], sgd(model), **settings)


def share(batch: Batch, rank: int) -> Batch:
    return tuple(part.chunk(RANKS)[rank] for part in batch)


def work(rank: int, world: int) -> dict:
    return {case: outcome(case, rank) for case in CASES}


def outcome(case: str, rank: int) -> dict:
    model = mlp(torch.float64)
    ddp = DistributedDataParallel(model)
    opt = optimizer(case, model, ddp)
    losses = train(opt, ddp, [share(batch, rank) for batch in batches(4, dtype=torch.float64)])
    return {
        "weights": weights(model),
        "metric": {} if opt.geometry is None else opt.geometry.metric.named_factors(),
        "loss": torch.stack(losses),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    return on_ranks(RANKS, tmp_path_factory.mktemp("ranks"), work)


@pytest.mark.parametrize("case", CASES)
def test_weights_and_metrics_are_bit_identical_on_all_ranks(ranks, case):
    for part in ("weights", "metric"):
        first, second = (rank[case][part] for rank in ranks)
        assert first.keys() == second.keys()
        assert all(first[name].equal(second[name]) for name in first)
    assert not ranks[0][case]["loss"].equal(ranks[1][case]["loss"]), "each rank saw its own data"
    assert bool(ranks[0][case]["metric"]) == ("llqr" in case)


@pytest.mark.parametrize("case", ["sam", "fsam"])
def test_a_shared_probe_equals_one_process_on_the_joined_batch(ranks, case):
    model = mlp(torch.float64)
    train(optimizer(case, model, model), model, batches(4, dtype=torch.float64))
    torch.testing.assert_close(ranks[0][case]["weights"], weights(model), rtol=1e-10, atol=1e-12)


def test_a_metric_equals_the_one_of_one_process_on_the_joined_batch(ranks):
    model = mlp(torch.float64)
    geometry = quick_geometry(model, "kfac")
    opt = llqr.LLQRSAM(sgd(model), geometry, rho=0.5)
    train(opt, model, batches(4, dtype=torch.float64))
    torch.testing.assert_close(ranks[0]["llqr+sam"]["metric"], geometry.metric.named_factors(), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(ranks[0]["llqr+sam"]["weights"], weights(model), rtol=1e-12, atol=1e-13)


def test_own_probes_equal_a_hand_written_reference(ranks):
    """m-sharpness: every rank climbs its own loss; the update is the mean of the gradients taken at these points."""
    model = mlp(torch.float64)
    base = sgd(model)
    parameters = list(model.parameters())
    for batch in batches(4, dtype=torch.float64):
        update = [torch.zeros_like(p) for p in parameters]
        for x, y in (share(batch, rank) for rank in range(RANKS)):
            g = torch.autograd.grad(cross_entropy(model(x), y), parameters)
            norm = torch.cat([part.flatten() for part in g]).norm()
            there = {
                name: p.detach() + 0.5 * part / norm
                for (name, p), part in zip(model.named_parameters(), g, strict=True)
            }
            for w in there.values():
                w.requires_grad_()
            loss = cross_entropy(torch.func.functional_call(model, there, x), y)
            for total, part in zip(update, torch.autograd.grad(loss, list(there.values())), strict=True):
                total += part / RANKS
        for p, total in zip(parameters, update, strict=True):
            p.grad = total
        base.step()
    torch.testing.assert_close(ranks[0]["own sam"]["weights"], weights(model), rtol=1e-10, atol=1e-12)
    shared = ranks[0]["sam"]["weights"]
    assert any((w - shared[name]).abs().max() > 1e-3 for name, w in ranks[0]["own sam"]["weights"].items())


def test_no_sync_is_entered_in_the_first_pass_only():
    model, (batch,) = mlp(), batches(1)
    entered = []

    @contextlib.contextmanager
    def no_sync():
        entered.append("in")
        yield
        entered.append("out")

    opt = llqr.SAM(sgd(model), rho=0.05, no_sync=no_sync, start_after=1)

    def closure():
        entered.append("pass")
        return closure_of(opt, model, batch)()

    opt.step(closure)
    assert entered == ["pass"], "a warm-up has one pass, which must be synchronised"
    opt.step(closure)
    assert entered == ["pass", "in", "pass", "out", "pass"]

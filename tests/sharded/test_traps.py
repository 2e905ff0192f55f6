"""What may go wrong beside sharded weights: refusals, statistics, low precision, resuming, a rank that fails."""

import tempfile
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor

import llqr
from geometries import flat_geometry
from processes import on_ranks
from sharded_models import batches, fsdp2, fsdp2_and_tensor_parallel, network, tensor_parallel, weights

from . import test_metric, test_step

mse, cross_entropy = nn.functional.mse_loss, nn.functional.cross_entropy


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def closure_of(opt, model, batch, loss_fn=mse):
    def closure():
        opt.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        return loss

    return closure


def refusal(action):
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refusals(rank, world):
    here = {"device_id": torch.device("cpu")}
    flat = FullyShardedDataParallel(network(), use_orig_params=False, **here)
    views = FullyShardedDataParallel(network(), use_orig_params=True, **here)
    copies = FullyShardedDataParallel(network(), sharding_strategy=ShardingStrategy.NO_SHARD, **here)
    parallel, both = tensor_parallel(world)[0], fsdp2_and_tensor_parallel(world)[0]
    model, share, shares = fsdp2(world)
    batch = [part.chunk(shares)[share] for part in batches(1)[0]]
    opt = llqr.SAM(sgd(model))
    closure = closure_of(opt, model, batch)

    def outside():
        closure()
        opt.step(lambda: mse(model(batch[0]), batch[1]).backward())

    return {
        "fsdp1": refusal(lambda: llqr.SAM(sgd(flat))),
        "fsdp1 with the original parameters": refusal(lambda: llqr.SAM(sgd(views))),
        "fsdp1 without shards": refusal(lambda: llqr.SAM(sgd(copies))),
        "a geometry of fsdp1": refusal(lambda: llqr.Geometry(views, mse)),
        "own probes": refusal(lambda: llqr.SAM(sgd(model), no_sync=model.set_requires_gradient_sync)),
        "a geometry": refusal(lambda: llqr.Geometry(model, mse)),
        "a geometry of tensor parallel weights": refusal(lambda: llqr.Geometry(parallel, mse, shards="all")),
        "a geometry of two dimensions": refusal(lambda: llqr.Geometry(both, mse, shards="all")),
        "a captured refresh": refusal(
            lambda: llqr.Geometry(model, mse, shards="all", runtime=llqr.Runtime(capture=True))
        ),
        "gradients from outside": refusal(outside),
        "a step after that": refusal(lambda: opt.step(closure)),
    }


class WithStatistics(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))


def with_statistics(model):
    """All ranks see the same batch, so that their statistics are those of one process."""
    opt = llqr.SAM(sgd(model), rho=0.5)
    for x, y in batches(2):
        opt.step(closure_of(opt, model, (x[:, 0].float(), y[:, 0].float())))
    return weights(model)


def low_precision(rank, world, rho):
    """In bfloat16, weights kept in float32: how far SAM moves them, and which dtype they have."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    model = network().float()
    fully_shard(model, mp_policy=policy)
    opt = llqr.SAM(sgd(model), rho=rho)
    x, y = (part.chunk(world)[rank].float() for part in batches(1)[0])
    opt.step(closure_of(opt, model, (x, y)))
    return weights(model)


def scaled(rank, world):
    """A loss scale that overflows on one rank only: no rank steps, and all of them reduce the scale."""
    model, _, _ = fsdp2(world)
    model = model.float()
    opt = llqr.SAM(sgd(model), rho=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before = weights(model)
    scales, moved = [], []
    for step in range(2):
        x, y = (part.chunk(world)[rank].float() for part in batches(1)[0])

        def closure(x=x, y=y, step=step):
            opt.zero_grad()
            loss = mse(model(x), y)
            (scaler.scale(loss) * (float("inf") if step == 0 and rank == 1 else 1.0)).backward()
            return loss

        opt.step(closure, grad_scaler=scaler)
        scaler.update()
        scales.append(scaler.get_scale())
        moved.append(not weights(model)["up.weight"].equal(before["up.weight"]))
    return {"scales": scales, "moved": moved, "weights": weights(model)}


def resumed(rank, world):
    """F-SAM's memory goes through a state dictionary, as a sharded tensor and as whole tensors."""
    ends = []
    for form in ("none", "sharded", "whole"):
        model, share, shares = fsdp2(world)
        opt = llqr.FriendlySAM(sgd(model), rho=0.3)
        for i, batch in enumerate(batches(4)):
            if i == 2 and form != "none":
                state = opt.state_dict()
                memory = state["llqr"]["probe"]["mean"]
                assert all(isinstance(mean, DTensor) for mean in memory.values())
                if form == "whole":
                    memory |= {key: mean.full_tensor() for key, mean in memory.items()}
                opt = llqr.FriendlySAM(sgd(model), rho=0.3)
                opt.load_state_dict(state)
            opt.step(closure_of(opt, model, [part.chunk(shares)[share] for part in batch]))
        ends.append(weights(model))
    return ends


def failing(rank, world):
    """Rank 1 fails in the closure of its second pass; the time after which rank 0 knows, and what both then have."""
    ranks = dist.new_group(list(range(world)), timeout=timedelta(seconds=3))
    model = fully_shard(network(), mesh=DeviceMesh.from_group(ranks, "cpu"))
    opt = llqr.FriendlySAM(sgd(model), rho=0.3)
    centre = [part.to_local().clone() for part in model.parameters()]
    batch = [part.chunk(world)[rank] for part in batches(1)[0]]
    passes = []

    def closure():
        passes.append(1)
        if rank == 1 and len(passes) == 2:
            raise ArithmeticError("on one rank")
        return closure_of(opt, model, batch)()

    started = time.monotonic()
    met = refusal(lambda: opt.step(closure))
    restored = all(part.to_local().equal(was) for part, was in zip(opt._order(), centre, strict=True))
    return {
        "met": met,
        "seconds": time.monotonic() - started,
        "restored": restored,
        "steps": opt.steps,
        "memory": len(opt.state_dict()["llqr"]["probe"]["mean"]),
    }


def traffic(rank, world):
    """Entries that this rank receives for one `U g`, and how many of them are neither held nor owned here."""
    model = test_metric.sharded(world, "fsdp2")
    geometry = flat_geometry(model, cross_entropy, structure="kfac", steps=1, shards="all")
    x, y = (part.chunk(world)[rank] for part in test_metric.batches(1)[0])
    geometry.refresh((x, y))
    received = []
    exchange = dist.all_to_all_single

    def counted(output, given, output_lengths, lengths, group):
        received.append(sum(length for i, length in enumerate(output_lengths) if i != rank))
        return exchange(output, given, output_lengths, lengths, group=group)

    parameters = list(model.parameters())
    dist.all_to_all_single = counted
    try:
        geometry.transport(parameters, [torch.ones_like(parameter) for parameter in parameters])
    finally:
        dist.all_to_all_single = exchange
    own = {block.name for block in geometry.metric.blocks}
    there, back = 0, 0
    for block in geometry.metric.whole.blocks:
        parameter = geometry.parameters[block.parameter]
        here = torch.zeros(parameter.shape, dtype=torch.bool)
        for chunk in here.chunk(world)[rank : rank + 1]:
            chunk.fill_(True)
        held = int(block.piece(here).sum())
        there += block.size - held if block.name in own else 0
        back += 0 if block.name in own else held
    return {"received": received, "needed": [there, back]}


def stored(rank, world):
    """Through torch's distributed checkpoints: the largest difference from a run that was not interrupted."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    data = [[part.chunk(world)[rank] for part in batch] for batch in test_metric.batches(4)]

    def fresh():
        model = test_metric.sharded(world, "fsdp2")
        geometry = flat_geometry(model, cross_entropy, structure="kfac", steps=2, lr=0.02, every=2, shards="all")
        return model, llqr.build("llqr+fsam", sgd(model), geometry=geometry, rho=0.3)

    def train(model, opt, some):
        for batch in some:
            opt.step(closure_of(opt, model, batch, cross_entropy), batch=batch)
        return weights(model)

    model, opt = fresh()
    train(model, opt, data[:2])
    model_state, state = get_state_dict(model, opt)
    dcp.save({"model": model_state, "optimizer": state}, checkpoint_id=folder[0])
    expected = train(model, opt, data[2:])
    model, opt = fresh()
    model_state, state = get_state_dict(model, opt)
    dcp.load({"model": model_state, "optimizer": state}, checkpoint_id=folder[0])
    set_state_dict(model, opt, model_state_dict=model_state, optim_state_dict=state)
    found = train(model, opt, data[2:])
    return max(float((found[name] - tensor).abs().max()) for name, tensor in expected.items())


def through_passes(rank, world):
    """A refresh by FSDP's own passes: what it leaves as it was, and how far `H g` in bfloat16 is from float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    x, y = (part.chunk(world)[rank].float() for part in batches(1)[0])
    products, untouched = [], []
    for engine, settings in (("double-backward", {}), ("passes", {"mp_policy": policy})):
        model = fully_shard(network().float(), **settings)
        geometry = flat_geometry(model, mse, structure="kfac", steps=1, engine=engine, shards="all")
        with geometry.quadratic_model((x, y)) as quadratic:
            Hg = quadratic.product(quadratic.gradient)
        products.append(torch.cat([Hg[name].flatten() for name in sorted(Hg)]))
        mse(model(x).float(), y).backward()
        before = [(p.to_local().clone(), p.grad, p.grad.to_local().clone()) for p in model.parameters()]
        geometry.refresh((x, y))
        after = list(model.parameters())
        untouched.append(
            model.training
            and all(
                p.to_local().equal(weight) and p.grad is gradient and gradient.to_local().equal(values)
                for p, (weight, gradient, values) in zip(after, before, strict=True)
            )
        )
    exact, found = products
    return {"untouched": untouched, "error": float((found - exact).norm() / exact.norm())}


def failing_refresh(rank, world):
    """Rank 1 cannot linearise, then sees NaN."""
    model, share, shares = fsdp2(world)
    geometry = flat_geometry(model, mse, structure="kfac", steps=3, shards="all")
    x, y = (part.chunk(shares)[share] for part in batches(1)[0])
    raised = refusal(lambda: geometry.refresh((x[..., :2] if rank == 1 else x, y)))
    geometry.refresh((x, y))
    before = {name: factor.clone() for name, factor in geometry.metric.named_factors().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accepted = geometry.refresh((x * float("nan") if rank == 1 else x, y)).accepted
    kept = all(factor.equal(before[name]) for name, factor in geometry.metric.named_factors().items())
    afterwards = geometry.refresh((x, y)).accepted
    return {"raised": raised, "not a number": accepted, "kept": kept, "afterwards": afterwards}


def not_a_number(rank, world):
    """Rank 1 alone sees NaN: all ranks have it in their gradients, and so in their weights, as without a probe."""
    model, share, shares = fsdp2(world)
    opt = llqr.SAM(sgd(model), rho=0.3)
    x, y = (part.chunk(shares)[share] for part in batches(1)[0])
    opt.step(closure_of(opt, model, (x * float("nan") if rank == 1 else x, y)))
    return [bool(tensor.isnan().all()) for tensor in weights(model).values()]


def work(rank, world):
    return {
        "steps": test_step.compare(test_step.FEW, world),
        "metrics": test_metric.compare(test_metric.FEW, rank, world),
        "failing refresh": failing_refresh(rank, world),
        "traffic": traffic(rank, world),
        "passes": through_passes(rank, world),
        "stored": stored(rank, world),
        "refusals": refusals(rank, world),
        "statistics": with_statistics(fully_shard(WithStatistics())),
        "low precision": [low_precision(rank, world, rho) for rho in (0.0, 0.5)],
        "scaled": scaled(rank, world),
        "resumed": resumed(rank, world),
        "not a number": not_a_number(rank, world),
        "failing": failing(rank, world),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_ranks(2, tmp_path_factory.mktemp("ranks"), work)


def test_the_sam_family_equals_one_process_on_the_joined_batch(ranks):
    test_step.assert_as_in_one_process([found["steps"] for found in ranks], test_step.FEW)


def test_a_metric_equals_one_process_on_the_joined_batch(ranks):
    test_metric.assert_as_in_one_process([found["metrics"] for found in ranks], test_metric.FEW)


def test_only_what_another_rank_has_travels(ranks):
    for found in ranks:
        assert found["traffic"]["received"] == found["traffic"]["needed"]
        assert all(count > 0 for count in found["traffic"]["received"])


def test_a_refresh_by_passes_leaves_weights_and_gradients_and_suits_low_precision(ranks):
    """With a difference of the length that suits float32, bfloat16 would see nothing but rounding."""
    for found in ranks:
        assert found["passes"]["untouched"] == [True, True]
        assert found["passes"]["error"] < 0.05


def test_checkpoints_continue_bit_exactly(ranks):
    assert [found["stored"] for found in ranks] == [0.0, 0.0]


def test_a_refresh_that_fails_on_one_rank_fails_on_all(ranks):
    outcomes = [found["failing refresh"] for found in ranks]
    assert "RankError" in outcomes[0]["raised"]
    assert "batch: the model cannot be called on its inputs" in outcomes[1]["raised"]
    for found in outcomes:
        assert (found["not a number"], found["kept"], found["afterwards"]) == (False, True, True)


@pytest.mark.parametrize("wrapped", ["fsdp1", "fsdp1 with the original parameters", "fsdp1 without shards"])
def test_fsdp1_is_refused(ranks, wrapped):
    for found in ranks:
        assert "torch.distributed.fsdp.fully_shard" in found["refusals"][wrapped]


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("a geometry of fsdp1", "torch.distributed.fsdp.fully_shard"),
        ("own probes", "no_sync: a probe of each rank's own"),
        ("a geometry", "shards: the weights are split among 2 ranks"),
        ("a geometry of tensor parallel weights", "let fully_shard take all parameters"),
        ("a geometry of two dimensions", "sharded otherwise than by FSDP2 (fully_shard) alone"),
        ("a captured refresh", "capture: not with shards"),
        ("gradients from outside", "step: the gradients of a backward pass outside the closure"),
    ],
)
def test_what_is_refused_with_shards(ranks, case, sentence):
    for found in ranks:
        assert sentence in found["refusals"][case]
        assert not found["refusals"]["a step after that"]


def test_statistics_are_those_of_one_process(ranks):
    for found in ranks:
        torch.testing.assert_close(found["statistics"], with_statistics(WithStatistics()), rtol=1e-5, atol=1e-6)


def test_low_precision_passes(ranks):
    """Beside the same network in bfloat16 in one process, whose halves of the batch are averaged."""
    for i, rho in enumerate((0.0, 0.5)):
        expected = _low_precision_by_hand(rho)
        for found in ranks:
            assert all(tensor.dtype == torch.float32 for tensor in found["low precision"][i].values())
            torch.testing.assert_close(found["low precision"][i], expected, rtol=0, atol=2e-3)
    assert any(
        (a - b).abs().max() > 1e-2 for a, b in zip(*(r.values() for r in ranks[0]["low precision"]), strict=True)
    )


def _low_precision_by_hand(rho):
    model = network().float()
    opt = llqr.SAM(sgd(model), rho=rho)
    x, y = (part.float() for part in batches(1)[0])

    def closure():
        opt.zero_grad()
        for inputs, targets in zip(x.chunk(2), y.chunk(2), strict=True):
            low = {name: parameter.bfloat16() for name, parameter in model.named_parameters()}
            outputs = torch.func.functional_call(model, low, inputs.bfloat16()).float()
            (mse(outputs, targets) / 2).backward()
        return torch.zeros(())

    opt.step(closure)
    return weights(model)


def test_an_overflow_on_one_rank_is_one_on_all(ranks):
    for found in ranks:
        assert found["scaled"]["scales"] == [2.0**9, 2.0**9]
        assert found["scaled"]["moved"] == [False, True]
    torch.testing.assert_close(ranks[0]["scaled"]["weights"], ranks[1]["scaled"]["weights"], rtol=0, atol=0)


def test_the_memory_of_a_probe_is_saved_and_loaded(ranks):
    for found in ranks:
        first, *others = found["resumed"]
        for other in others:
            torch.testing.assert_close(other, first, rtol=0, atol=0)


def test_not_a_number_on_one_rank_is_the_same_on_all(ranks):
    for found in ranks:
        assert all(found["not a number"])


def test_a_rank_that_fails_leaves_none_at_the_probe(ranks):
    """The others wait for it in FSDP's own collectives, until the group's timeout."""
    assert ranks[1]["failing"]["met"] == "ArithmeticError: on one rank"
    assert ranks[0]["failing"]["met"]
    for found in ranks:
        assert found["failing"]["seconds"] < 60
        assert (found["failing"]["restored"], found["failing"]["steps"], found["failing"]["memory"]) == (True, 0, 0)

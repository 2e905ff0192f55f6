"""What may go wrong beside sharded weights: refusals, statistics, low precision, resuming, a rank that fails."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor

import llqr
from imitated_nccl import cuda_only
from processes import on_ranks
from sharded_models import (
    batches,
    closure_of,
    fsdp2,
    fsdp2_and_tensor_parallel,
    network,
    refusal,
    sgd,
    tensor_parallel,
    weights,
)

from . import refreshes, test_metric, test_step

mse = nn.functional.mse_loss


def refusals(rank, world):
    here = {"device_id": torch.device("cpu")}
    flat = FullyShardedDataParallel(network(), use_orig_params=False, **here)
    views = FullyShardedDataParallel(network(), use_orig_params=True, **here)
    copies = FullyShardedDataParallel(network(), sharding_strategy=ShardingStrategy.NO_SHARD, **here)
    parallel, both = tensor_parallel(world)[0], fsdp2_and_tensor_parallel(world)[0]
    model, share, shares = fsdp2(world)
    batch = [part.chunk(shares)[share] for part in batches(1)[0]]
    opt = llqr.SAM(sgd(model), rho=0.05)
    closure = closure_of(opt, model, batch, mse)

    def outside():
        closure()
        opt.step(lambda: mse(model(batch[0]), batch[1]).backward())

    return {
        "fsdp1": refusal(lambda: llqr.SAM(sgd(flat), rho=0.05)),
        "fsdp1 with the original parameters": refusal(lambda: llqr.SAM(sgd(views), rho=0.05)),
        "fsdp1 without shards": refusal(lambda: llqr.SAM(sgd(copies), rho=0.05)),
        "a geometry of fsdp1": refusal(lambda: llqr.Geometry(views, mse)),
        "own probes": refusal(lambda: llqr.SAM(sgd(model), rho=0.05, no_sync=model.set_requires_gradient_sync)),
        "a geometry": refusal(lambda: llqr.Geometry(model, mse)),
        "a geometry of tensor parallel weights": refusal(lambda: llqr.Geometry(parallel, mse, shards="all")),
        "a geometry of two dimensions": refusal(lambda: llqr.Geometry(both, mse, shards="all")),
        "a geometry of columns": refusal(
            lambda: llqr.Geometry(test_metric.sharded(world, "columns"), mse, shards="all")
        ),
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
    opt = llqr.SAM(sgd(model), rho=0.5, model=model)
    for x, y in batches(2):
        opt.step(closure_of(opt, model, (x[:, 0].float(), y[:, 0].float()), mse))
    return weights(model)


def low_precision(rank, world, rho):
    """In bfloat16, weights kept in float32: how far SAM moves them, and which dtype they have."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    model = network().float()
    fully_shard(model, mp_policy=policy)
    opt = llqr.SAM(sgd(model), rho=rho)
    x, y = (part.chunk(world)[rank].float() for part in batches(1)[0])
    opt.step(closure_of(opt, model, (x, y), mse))
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
                memory = state["param_groups"][0]["llqr_tensors"]["mean"]
                assert all(isinstance(mean, DTensor) for mean in memory.values())
                if form == "whole":
                    memory |= {key: mean.full_tensor() for key, mean in memory.items()}
                opt = llqr.FriendlySAM(sgd(model), rho=0.3)
                opt.load_state_dict(state)
            opt.step(closure_of(opt, model, [part.chunk(shares)[share] for part in batch], mse))
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
        return closure_of(opt, model, batch, mse)()

    started = time.monotonic()
    met = refusal(lambda: opt.step(closure))
    restored = all(part.to_local().equal(was) for part, was in zip(opt._order(), centre, strict=True))
    return {
        "met": met,
        "seconds": time.monotonic() - started,
        "restored": restored,
        "steps": opt.steps,
        "memory": len(opt.state_dict()["param_groups"][0]["llqr"].content["probe"]["mean"]),
    }


class TwoDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3).double()

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)).double())

    @classmethod
    def sharded(cls):
        """FSDP2 wants one dtype in each group of weights."""
        model = cls()
        fully_shard(model.first)
        return fully_shard(model)


def two_dtypes(model, share, shares):
    """The weights after a refresh and a step, where only some of them are float64."""
    geometry = llqr.Geometry(model, nn.functional.cross_entropy, shards="all")
    opt = llqr.LLQRSAM(sgd(model), geometry, rho=0.3)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)
    batch = x.chunk(shares)[share], y.chunk(shares)[share]
    opt.step(closure_of(opt, model, batch, nn.functional.cross_entropy), batch=batch)
    assert geometry.failures == 0
    return weights(model)


def not_a_number(rank, world):
    """Rank 1 alone sees NaN: all ranks have it in their gradients, and so in their weights, as without a probe."""
    model, share, shares = fsdp2(world)
    opt = llqr.SAM(sgd(model), rho=0.3)
    x, y = (part.chunk(shares)[share] for part in batches(1)[0])
    opt.step(closure_of(opt, model, (x * float("nan") if rank == 1 else x, y), mse))
    return [bool(tensor.isnan().all()) for tensor in weights(model).values()]


STEPS_OF_CUDA = {name: test_step.FEW[name] for name in ("fsdp2, sam", "fsdp2, clipped")}
METRICS_OF_CUDA = {name: test_metric.FEW[name] for name in ("fsdp2",)}


def with_cuda_only(rank, world):
    """The same where collectives take nothing from the host, which is where all of these tensors are."""
    with cuda_only() as group:
        found = {
            "steps": test_step.compare(STEPS_OF_CUDA, world),
            "metrics": test_metric.compare(METRICS_OF_CUDA, rank, world),
            "scaled": scaled(rank, world)["scales"],
        }
    return found | {"collectives": group.collectives}


def work(rank, world):
    return {
        "steps": test_step.compare(test_step.FEW, world),
        "metrics": test_metric.compare(test_metric.FEW, rank, world),
        "failing first refresh": refreshes.failing_first_refresh(rank, world),
        "failing refresh": refreshes.failing_refresh(rank, world),
        "traffic": refreshes.traffic(rank, world),
        "cuda only": with_cuda_only(rank, world),
        "warned": refreshes.warned(rank, world),
        "stored": refreshes.stored(rank, world),
        "refusals": refusals(rank, world),
        "statistics": with_statistics(fully_shard(WithStatistics())),
        "low precision": [low_precision(rank, world, rho) for rho in (0.0, 0.5)],
        "scaled": scaled(rank, world),
        "resumed": resumed(rank, world),
        "two dtypes": two_dtypes(TwoDtypes.sharded(), rank, world),
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


def test_nothing_travels_on_the_host_if_the_group_does_not_take_it_there(ranks):
    found = [found["cuda only"] for found in ranks]
    test_step.assert_as_in_one_process([each["steps"] for each in found], STEPS_OF_CUDA)
    test_metric.assert_as_in_one_process([each["metrics"] for each in found], METRICS_OF_CUDA)
    assert [each["scaled"] for each in found] == 2 * [[2.0**9, 2.0**9]]
    assert all(each["collectives"] > 0 for each in found)


def test_only_what_another_rank_has_travels(ranks):
    for found in ranks:
        assert found["traffic"]["received"] == found["traffic"]["needed"]
        assert all(count > 0 for count in found["traffic"]["received"])


def test_losses_that_are_sums_or_have_no_curvature_get_a_warning(ranks):
    for found in ranks:
        (of_sum,), (of_linear,) = (found["warned"][loss] for loss in ("a sum", "linear"))
        assert "it doubles when every sample is taken twice" in of_sum
        assert "the curvature along the gradient is zero" in of_linear


def test_checkpoints_continue_bit_exactly(ranks):
    assert [found["stored"] for found in ranks] == 2 * [(0.0, 4, "double-backward")]


def test_a_refresh_that_fails_on_one_rank_fails_on_all(ranks):
    assert [found["failing first refresh"] for found in ranks] == [("RankError", True), ("ArithmeticError", True)]
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
        ("a geometry of two dimensions", "sharded otherwise than by FSDP2 (fully_shard) along their first dimension"),
        ("a geometry of columns", "sharded otherwise than by FSDP2 (fully_shard) along their first dimension"),
        ("a captured refresh", "capture: not with shards"),
        ("gradients from outside", "step: there are gradients of a backward pass outside the closure"),
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


def test_weights_of_two_dtypes(ranks):
    expected = two_dtypes(TwoDtypes(), 0, 1)
    for found in ranks:
        torch.testing.assert_close(found["two dtypes"], expected, rtol=1e-5, atol=1e-6)


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

"""The metric of several ranks is that of one process on the joined batch; a rank that fails leaves none waiting."""

import contextlib
import gc
import warnings
import weakref
from dataclasses import replace
from itertools import cycle

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from geometries import flat_geometry
from llqr.distributed.ranks import RankError, Ranks
from llqr.metric import STRUCTURES
from processes import on_ranks

ROWS = 12
SHARED_ONLY = r"model: '1' is a SyncBatchNorm without running statistics, .*; let it track them"
#: Where the joined batch is cut between ranks, evenly and unevenly.
CUTS = {2: {"even": [6, 6], "uneven": [3, 9]}, 4: {"even": [3, 3, 3, 3], "uneven": [1, 5, 2, 4]}}
CASES = [
    *zip(sorted(STRUCTURES.keys() - {"identity"}), cycle(["ngd"]), cycle(["sum", "mean"]), strict=False),
    ("e-kfac", "newton", "mean"),
    ("diagonal", "newton", "sum"),
    ("kfac", "ngd", 3.5),
]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def batch():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (ROWS,), generator=generator)
    y[[1, 7, 8]] = -100  # ignored, so that ranks with equal rows have unequal terms
    return x, y


def learned(model, data, case, **settings):
    kind, divergence, scale = case
    geometry = flat_geometry(
        model,
        F.cross_entropy,
        structure=kind,
        divergence=divergence,
        curvature_scale=scale,
        steps=4,
        lr=0.05,
        **settings,
    )
    geometry.refresh(data)
    geometry.refresh(data)
    return geometry.metric.named_factors()


def normalised(kind):
    """A network with running statistics. In eval mode torch's SyncBatchNorm needs neither other ranks nor CUDA."""
    model = nn.Sequential(nn.Linear(5, 6), kind(6), nn.Tanh(), nn.Linear(6, 3)).double()
    torch.manual_seed(0)
    for tensor in model.state_dict().values():
        tensor.copy_(torch.rand_like(tensor.double()) + 0.1)
    return model


def compare(rank, world):
    found = {}
    for cut, sizes in CUTS[world].items():
        own = tuple(part.split(sizes)[rank] for part in batch())
        for case in CASES:
            found[f"{cut} {case}"] = learned(DistributedDataParallel(network()), own, case, engine="double-backward")
    several = {"solver": "pcg", "normalise": True, "damping": "10%"}
    own = tuple(part.split(CUTS[world]["uneven"])[rank] for part in batch())
    found["pcg"] = learned(DistributedDataParallel(network()), own, ("scalar", "ngd", "mean"), **several)
    synchronised = normalised(nn.SyncBatchNorm)  # without DDP, which wants it on CUDA devices
    found["statistics"] = learned(synchronised, own, ("kfac", "ngd", "sum"), process_group=dist.group.WORLD)
    return found


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_learn_the_metric_of_the_joined_batch(world, tmp_path):
    ranks = on_ranks(world, tmp_path, compare)
    joined = {case: learned(network(), batch(), case, engine="double-backward") for case in CASES}
    expected = {f"{cut} {case}": factors for cut in CUTS[world] for case, factors in joined.items()}
    several = {"solver": "pcg", "normalise": True, "damping": "10%"}
    expected["pcg"] = learned(network(), batch(), ("scalar", "ngd", "mean"), **several)
    expected["statistics"] = learned(normalised(nn.BatchNorm1d), batch(), ("kfac", "ngd", "sum"))
    for found in ranks:
        assert found.keys() == expected.keys()
        for case, factors in expected.items():
            for name, factor in factors.items():
                torch.testing.assert_close(found[case][name], factor, rtol=1e-12, atol=1e-12, msg=f"{case} {name}")


@pytest.mark.parametrize("world", [1, 2])
def test_statistics_that_a_refresh_would_not_share_are_refused(world):
    """In eval mode a SyncBatchNorm without running statistics takes those of its own rank's batch."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        model = nn.Sequential(nn.Linear(5, 6), nn.SyncBatchNorm(6, track_running_stats=False), nn.Linear(6, 3))
        geometry = flat_geometry(model, F.cross_entropy)
        with pytest.raises(ValueError, match=SHARED_ONLY) if world > 1 else contextlib.nullcontext():
            flat_geometry(model, F.cross_entropy, process_group=dist.group.WORLD)
        with pytest.raises(ValueError, match=SHARED_ONLY) if world > 1 else contextlib.nullcontext():
            geometry.linearizer.learn_with(dist.group.WORLD)
        for norm in (nn.SyncBatchNorm(6), nn.BatchNorm1d(6, track_running_stats=False)):
            model[1] = norm
            assert flat_geometry(model, F.cross_entropy, process_group=dist.group.WORLD).engine == "auto"
    finally:
        dist.destroy_process_group()


def alone_and_in_a_subgroup(rank, world):
    """Without DDP every rank learns its own; with a group, only its members learn together."""
    own = tuple(part.split([6, 6])[rank] for part in batch())
    case = ("kfac", "ngd", "sum")
    apart = [dist.new_group([member]) for member in range(world)]
    whole = dist.new_group(list(range(world)))
    return {
        "alone": learned(network(), own, case),
        "subgroup": learned(DistributedDataParallel(network(), process_group=apart[rank]), own, case),
        "group": learned(network(), own, case, process_group=whole),
    }


@pytest.mark.slow
def test_the_group_is_that_of_the_wrapper_or_the_one_that_is_given(tmp_path):
    ranks = on_ranks(2, tmp_path, alone_and_in_a_subgroup)
    case = ("kfac", "ngd", "sum")
    for rank, found in enumerate(ranks):
        own = learned(network(), tuple(part.split([6, 6])[rank] for part in batch()), case)
        joined = learned(network(), batch(), case)
        for name in own:
            torch.testing.assert_close(found["alone"][name], own[name], rtol=0, atol=0)
            torch.testing.assert_close(found["subgroup"][name], own[name], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(found["group"][name], joined[name], rtol=1e-12, atol=1e-12)


def failing(rank, world):
    """Rank 1 cannot linearise, then a product of its fails, then it sees NaN; what each rank meets."""
    model = DistributedDataParallel(network())
    geometry = flat_geometry(model, F.cross_entropy, structure="kfac", steps=3, engine="double-backward")
    own = tuple(part.split([6, 6])[rank] for part in batch())
    geometry.refresh(own)
    before = {name: factor.clone() for name, factor in geometry.metric.named_factors().items()}
    met = []
    try:
        geometry.refresh((torch.ones(6, 9, dtype=torch.float64), own[1]) if rank == 1 else own)
    except RankError:
        met.append("another rank")
    except RuntimeError:
        met.append("its own error")
    linearise = geometry.linearizer._local

    def broken(problem):
        local, calls = linearise(problem), []

        def product(v):
            calls.append(v)
            if len(calls) == 2:  # neither the first nor the last, from which the objective is read
                raise RuntimeError("no")
            return local.product(v)

        return replace(local, product=product)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if rank == 1:
            geometry.linearizer._local = broken
        met.append(geometry.refresh(own).accepted)
        geometry.linearizer._local = linearise
        met.append(geometry.refresh((own[0] * float("nan"), own[1]) if rank == 1 else own).accepted)
    same = all(factor.equal(before[name]) for name, factor in geometry.metric.named_factors().items())
    met.append(geometry.refresh(own).accepted)
    return {"met": met, "same": same, "metric": geometry.metric.named_factors()}


def test_a_rank_that_fails_leaves_none_waiting_and_all_with_the_same_metric(tmp_path):
    first, second = on_ranks(2, tmp_path, failing)
    assert first["met"] == ["another rank", False, False, True]
    assert second["met"] == ["its own error", False, False, True]
    assert first["same"]
    assert second["same"]
    assert all(factor.equal(second["metric"][name]) for name, factor in first["metric"].items())


def test_what_a_failed_action_held_is_free_when_its_error_is():
    """The ranks go on with the old metric: activations may not wait for the garbage collector."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    gc.collect()
    gc.disable()
    try:
        held = []

        def action():
            activations = torch.ones(3)
            held.append(weakref.ref(activations))
            raise torch.linalg.LinAlgError("no")

        with contextlib.suppress(torch.linalg.LinAlgError):
            Ranks(dist.group.WORLD).all_or_none(action, torch.device("cpu"))
        assert held[0]() is None
    finally:
        gc.enable()
        dist.destroy_process_group()

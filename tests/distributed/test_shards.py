"""A metric that is shared out among ranks is the metric that one process learns on the joined batch."""

import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import llqr
from geometries import flat_geometry
from imitated_nccl import cuda_only
from llqr.distributed.ranks import RankError
from llqr.metric import STRUCTURES
from processes import on_ranks
from sharded_metrics import Run, batch, even_batch, network

#: Where the joined batch is cut between ranks.
CUTS = {2: [3, 9], 4: [1, 5, 2, 4]}
#: Every structure and scale, and every solver and option that takes an inner product over all blocks.
GRID = [
    {"structure": kind, "divergence": divergence, "curvature_scale": scale}
    for kind in sorted(STRUCTURES)
    for divergence in ("ngd", "newton")
    for scale in ("sum", "mean")
]
OPTIONS = {
    "extrapolated": {"structure": "e-kfac", "steps": 7, "product_every": 3},
    "pcg": {"structure": "scalar", "solver": "pcg", "damping": "10%", "normalise": True},
    "normalised": {"structure": "kfac", "normalise": True, "damping": "5%"},
    "adam": {"structure": "e-kfac-psd", "solver": "adam"},
    "bounds": {"structure": "kfac", "bounds": (0.9, 1.1), "lr": 0.5},
    "identity beside": {"structure": {"conv*": "identity", "*": "e-kfac"}, "damping": 0.1},
    "micro-batches": {"structure": "diag-kfac", "micro_batch": 2},
}
ENGINES = {
    "linearised": {"structure": "kfac", "engine": "linearised"},
    "compiled": {"structure": "e-kfac", "engine": "linearised", "compile": True},
    "forward": {"structure": "diag-kfac", "engine": "forward", "debias": True},
}


def learned(model, data, **settings):
    """Factors, what was reported, and `U` applied to a gradient that all ranks have."""
    settings = {"steps": 4, "lr": 0.05, "engine": "double-backward"} | settings
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of these metrics do nearly nothing
        geometry = flat_geometry(model, F.cross_entropy, **settings)
        reports = [geometry.refresh(data) for _ in range(2)]
    parameters = list(geometry.parameters.values())
    Ug = geometry.transport(parameters, [torch.cos(p.detach()) for p in parameters])
    numbers = [(r.objective_before, r.objective_after, r.loss, r.gradient_norm, r.change, r.cosine) for r in reports]
    effects = [(e.change, e.cosine, e.gain) for e in geometry.layer_effects().values()]
    return {
        "factors": {name: factor.clone() for name, factor in geometry.metric.named_factors().items()},
        "numbers": torch.tensor(numbers, dtype=torch.float64),
        "effects": torch.tensor(effects, dtype=torch.float64),
        "accepted": [report.accepted for report in reports],
        "Ug": dict(zip(geometry.parameters, Ug, strict=True)),
        "strides": [list(part.stride()) for part in Ug],
        "bytes": geometry.memory()["total"],
    }


def cases(grid):
    return {str(tuple(case.values())): case for case in grid} | OPTIONS


def assert_joined(ranks, expected, shards, case):
    """The parts of the ranks make up the whole; what all of them have is bit-equal and right."""
    parts = [found[case] for found in ranks]
    copies = [parts[i : i + shards] for i in range(0, len(parts), shards)]
    for copy in copies:
        names = [name for part in copy for name in part["factors"]]
        assert sorted(names) == sorted(expected["factors"]), case
        for part in copy:
            for name, factor in part["factors"].items():
                torch.testing.assert_close(factor, expected["factors"][name], rtol=1e-12, atol=1e-12, msg=case)
        for first, same in zip(copies[0], copy, strict=True):
            assert all(factor.equal(same["factors"][name]) for name, factor in first["factors"].items())
    assert sum(part["bytes"] for part in copies[0]) == expected["bytes"]
    for part in parts:
        assert part["accepted"] == expected["accepted"], case
        assert part["strides"] == expected["strides"]
        torch.testing.assert_close(part["Ug"], expected["Ug"], rtol=1e-12, atol=1e-12, msg=case)
        torch.testing.assert_close(part["numbers"], expected["numbers"], rtol=1e-9, atol=1e-12, equal_nan=True)
        torch.testing.assert_close(part["effects"], expected["effects"], rtol=1e-6, atol=1e-7, equal_nan=True)
        assert part["numbers"].equal(parts[0]["numbers"]) or part["numbers"].isnan().any()
        assert all(Ug.equal(parts[0]["Ug"][name]) for name, Ug in part["Ug"].items())


def on_a_share(rank, world, shards, grid):
    own = tuple(part.split(CUTS[world])[rank] for part in batch())
    return {
        name: learned(DistributedDataParallel(network()), own, shards=shards, **case)
        for name, case in cases(grid).items()
    }


#: What fits into a few seconds; the whole grid is slow.
FEW = [
    {"structure": "scalar", "divergence": "ngd", "curvature_scale": "sum"},
    {"structure": "diagonal", "divergence": "newton", "curvature_scale": "mean"},
    {"structure": "kfac", "divergence": "ngd", "curvature_scale": "mean"},
    {"structure": "e-kfac", "divergence": "ngd", "curvature_scale": "sum"},
    {"structure": "dense", "divergence": "newton", "curvature_scale": "sum"},
    {"structure": "identity", "divergence": "ngd", "curvature_scale": "sum"},
]
CUDA_ONLY = "('kfac', 'ngd', 'mean')"


def with_cuda_only(rank, world):
    """A metric that is shared out and one on every rank, where collectives take nothing from the host."""
    own = tuple(part.split(CUTS[world])[rank] for part in batch())
    with cuda_only() as group:
        model = DistributedDataParallel(network())
        found = [learned(model, own, shards=shards, **cases(FEW)[CUDA_ONLY]) for shards in ("all", None)]
    return {"learned": found, "collectives": group.collectives}


def two_ranks(rank, world, folder):
    return {
        "learned": on_a_share(rank, world, "all", FEW),
        "cuda only": with_cuda_only(rank, world),
        "trained": trained(rank, world, folder),
        "failed": failing(rank, world),
        "refused": refused(),
    }


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def two(tmp_path_factory, checkpoints):
    return on_ranks(2, tmp_path_factory.mktemp("ranks"), partial(two_ranks, folder=str(checkpoints)))


@pytest.mark.parametrize("case", cases(FEW))
def test_an_owned_metric_is_the_metric_of_the_joined_batch(two, case):
    expected = learned(network(), batch(), **cases(FEW)[case])
    assert_joined([found["learned"] for found in two], expected, 1 if case.startswith("('identity'") else 2, case)


def test_nothing_travels_on_the_host_if_the_group_does_not_take_it_there(two):
    expected = learned(network(), batch(), **cases(FEW)[CUDA_ONLY])
    for i, shards in enumerate((2, 1)):
        ranks = [{CUDA_ONLY: found["cuda only"]["learned"][i]} for found in two]
        assert_joined(ranks, expected, shards, CUDA_ONLY)
    assert all(found["cuda only"]["collectives"] > 0 for found in two)


def trained(rank, world, folder):
    run = Run(rank, world).advance(4)
    run.save(folder, raw=True)
    return run.weights()


def test_training_is_that_of_one_process(two):
    expected = Run().advance(4).weights()
    for found in two:
        torch.testing.assert_close(found["trained"], expected, rtol=1e-12, atol=1e-12)


def test_one_process_goes_on_from_the_checkpoint_of_two(two, checkpoints):
    """Four steps are done; the factors come from both ranks' files."""
    expected = Run().advance(9)
    resumed = Run().load(checkpoints, raw=True).advance(5)
    torch.testing.assert_close(resumed.weights(), expected.weights(), rtol=1e-12, atol=1e-12)
    assert resumed.opt.geometry.refreshes == expected.opt.geometry.refreshes == 3


def no_batch():
    raise RuntimeError("the loader is broken")


def failing(rank, world):
    """Rank 1 cannot linearise or has no batch; a product, then a decomposition of its fails; it sees NaN."""
    own = tuple(part.chunk(world)[rank] for part in even_batch())
    geometry = flat_geometry(
        DistributedDataParallel(network()),
        F.cross_entropy,
        structure="kfac",
        steps=3,
        engine="double-backward",
        bounds=(0.5, 2.0),
        shards="all",
    )
    geometry.refresh(own)
    before = {name: factor.clone() for name, factor in geometry.metric.named_factors().items()}
    met = []
    for bad in ((torch.ones(6, 1, 9, 9, dtype=torch.float64), own[1]), no_batch, 5):
        try:
            geometry.refresh(bad if rank == 1 else own)
        except RankError:
            met.append("another rank")
        except (RuntimeError, TypeError):
            met.append("its own error")
    linearizer = geometry.linearizer
    linearise, constrain = linearizer._local, geometry.metric.constrain

    def broken(problem):
        local = linearise(problem)

        def product(v):
            raise RuntimeError("no")

        return replace(local, product=product)

    def singular(factors):
        raise torch.linalg.LinAlgError("no")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if rank == 1:
            linearizer._local = broken
        met.append(geometry.refresh(own).accepted)
        linearizer._local = linearise
        met.append(geometry.refresh((own[0] * float("nan"), own[1]) if rank == 1 else own).accepted)
        if rank == 1:
            geometry.metric.constrain = singular
        met.append(geometry.refresh(own).accepted)
        geometry.metric.constrain = constrain
    same = all(factor.equal(before[name]) for name, factor in geometry.metric.named_factors().items())
    met.append(geometry.refresh(own).accepted)
    return {"met": met, "same": same}


def test_a_rank_that_fails_leaves_none_waiting_and_all_with_the_old_metric(two):
    first, second = (found["failed"] for found in two)
    assert first["met"] == 3 * ["another rank"] + [False, False, False, True]
    assert second["met"] == 3 * ["its own error"] + [False, False, False, True]
    assert first["same"]
    assert second["same"]


def refused():
    """What is said to arguments that cannot be met."""
    model = network()
    ddp = DistributedDataParallel(model)
    shared = flat_geometry(ddp, F.cross_entropy, shards=2)
    attempts = {
        "no group": lambda: flat_geometry(model, F.cross_entropy, shards="all"),
        "no divisor": lambda: flat_geometry(ddp, F.cross_entropy, shards=3),
        "few blocks": lambda: flat_geometry(nn.Linear(2, 2), F.cross_entropy, process_group=dist.group.WORLD, shards=2),
        "no_sync": lambda: llqr.LLQRSAM(torch.optim.SGD(model.parameters(), 0.1), shared, 0.05, no_sync=ddp.no_sync),
        "capture": lambda: flat_geometry(ddp, F.cross_entropy, shards=2, capture=True),
    }
    said = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except ValueError as error:
            said[name] = str(error)
    return said


def test_what_cannot_be_shared_out_is_refused(two):
    said = two[0]["refused"]
    assert "none are known; pass the model wrapped in DDP, or Runtime(process_group=" in said["no group"]
    assert said["no divisor"] == "shards: 3 do not divide the 2 ranks of the group; choose one of 1, 2"
    assert "can be taken apart into 1 pieces; choose at most 1, or a structure" in said["few blocks"]
    assert said["no_sync"].startswith("no_sync: a probe of each rank's own gradient needs the whole metric")
    assert said["capture"].startswith("capture: not with shards")


def test_one_process_has_one_shard():
    assert flat_geometry(network(), F.cross_entropy, shards="all").shards == 1
    assert flat_geometry(network(), F.cross_entropy, shards=1).shards == 1
    with pytest.raises(ValueError, match="none are known"):
        flat_geometry(network(), F.cross_entropy, shards=2)
    for wrong in (0, -1, True, "some", 1.5):
        with pytest.raises(ValueError, match="shards: expected None, 'all' or a whole number"):
            flat_geometry(network(), F.cross_entropy, shards=wrong)


def two_of_two(rank, world):
    return on_a_share(rank, world, 2, GRID)


def four_of_four(rank, world):
    return on_a_share(rank, world, "all", GRID)


def two_of_four(rank, world):
    return on_a_share(rank, world, 2, GRID)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "shards", "work"), [(2, 2, two_of_two), (4, 4, four_of_four), (4, 2, two_of_four)])
def test_every_structure_divergence_and_scale(world, shards, work, tmp_path):
    ranks = on_ranks(world, tmp_path, work)
    for name, case in cases(GRID).items():
        expected = learned(network(), batch(), **case)
        assert_joined(ranks, expected, 1 if case["structure"] == "identity" else shards, name)


def engines(rank, world):
    own = tuple(part.split(CUTS[world])[rank] for part in batch())
    return {
        name: learned(DistributedDataParallel(network()), own, shards="all", **case) for name, case in ENGINES.items()
    }


@pytest.mark.slow
def test_engines_and_compiled_products(tmp_path):
    ranks = on_ranks(2, tmp_path, engines)
    for name, case in ENGINES.items():
        assert_joined(ranks, learned(network(), batch(), **case), 2, name)

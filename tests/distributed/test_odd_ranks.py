"""Ranks that differ from the others: without terms, without a batch, or without a group that they know of."""

import copy
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import llqr
from geometries import flat_geometry
from processes import on_ranks
from sharded_models import refusal

from .test_ranks import batch, learned, network

CASES = [("kfac", "ngd", "sum"), ("kfac", "ngd", "mean")]


def without_terms():
    """The second half of all targets is ignored."""
    x, y = batch()
    return x, torch.where(torch.arange(len(y)) < 6, y, -100)


def work(rank, world):
    own = tuple(part.split([6, 6])[rank] for part in without_terms())
    found = {f"{case} {shards}": learned(DistributedDataParallel(network()), own, case, shards=shards)
             for case in CASES for shards in (None, "all")}  # fmt: skip
    model = network()
    due = flat_geometry(DistributedDataParallel(model), F.cross_entropy, structure="kfac")
    opt = llqr.LLQR(torch.optim.SGD(model.parameters(), lr=0.1), due)
    found["batch"] = refusal(lambda: opt.step(lambda: None, batch=own if rank == 0 else None))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        flat_geometry(network(), F.cross_entropy, structure="kfac", engine="forward").refresh(own)
    found["warned"] = sum("a metric of its own" in str(one.message) for one in caught)
    runtime = llqr.Runtime(process_group=dist.group.WORLD)
    found["copied"] = copy.deepcopy(llqr.Geometry(network(), F.cross_entropy, runtime=runtime)).refreshes
    return found


def test_ranks_that_differ(tmp_path):
    ranks = on_ranks(2, tmp_path, work, idle=30)
    for case in CASES:
        expected = learned(network(), without_terms(), case)
        for shards in (None, "all"):
            together = ranks[0][f"{case} {shards}"] | ranks[1][f"{case} {shards}"]
            torch.testing.assert_close(together, expected, rtol=1e-12, atol=1e-12)
    assert ranks[0]["batch"].startswith("RankError")
    assert "a refresh is due" in ranks[1]["batch"]
    assert [(found["warned"], found["copied"]) for found in ranks] == [(1, 0), (1, 0)]

"""Collectives on process groups that do not take tensors where they are, such as those of NCCL for the host's."""

import ast
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import llqr
from imitated_nccl import cuda_only
from llqr.distributed import collectives

#: Names of `torch.distributed` that hand tensors or objects to other ranks.
TRAVELS = ("all_", "reduce", "broadcast", "gather", "scatter", "send", "recv", "isend", "irecv", "monitored_barrier")


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("backends", "device"), [("cpu:gloo,cuda:nccl", "cpu"), ("cuda:gloo,cpu:gloo", "cpu"), ("cuda:nccl", "cuda")]
)
def test_tensors_travel_where_they_are_if_the_group_takes_them_there(backends, device, monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    assert collectives.carrier(torch.ones(1), group=None) == torch.device(device)


def test_a_tensor_that_travels_where_it_is_is_not_copied(alone, monkeypatch):
    handed = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op, group: handed.append(tensor))
    tensor = torch.ones(2)
    collectives.all_reduce(tensor, alone)
    assert handed[0] is tensor


def test_what_travels_elsewhere_comes_back(alone):
    given, into = torch.arange(4.0), torch.full((4,), -1.0)
    with cuda_only() as group:
        collectives.all_reduce(given, alone)
        collectives.all_reduce(given, alone, largest=True)
        for travel in (collectives.all_gather, collectives.reduce_scatter):
            travel(into.fill_(-1), given, alone)
            assert into.equal(given)
        collectives.all_to_all(into.fill_(-1), given, [4], [4], alone)
    assert into.equal(given)
    assert given.equal(torch.arange(4.0))
    assert group.collectives == 5


def test_the_imitation_refuses_what_was_not_sent(alone):
    with cuda_only() as group, pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        group.all_reduce(torch.ones(1), dist.ReduceOp.SUM, group=alone)


def test_every_collective_goes_through_this_module():
    root = Path(llqr.__file__).parent
    found = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            owner = node.value if isinstance(node, ast.Attribute) else None
            if isinstance(owner, ast.Name) and owner.id == "dist" and node.attr.startswith(TRAVELS):
                found.add((path.relative_to(root).as_posix(), node.attr))
    elsewhere = {(path, name) for path, name in found if path != "distributed/collectives.py"}
    assert found
    assert not elsewhere

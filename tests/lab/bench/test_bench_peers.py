"""Our steps beside pytorch_optimizer's: both sides do the same work."""

import sys

import pytest
import torch

from llqr.lab.bench import peers
from llqr.lab.bench.workload import Network, Setup
from llqr.lab.config.strict import ConfigurationError
from references import flat, trainable
from tiny_workloads import CNN, FP32, MLP, workload


@pytest.mark.slow
def test_every_row_has_whole_steps_and_the_optimizers_alone():
    rows = list(peers.measure(Setup([Network.parse(CNN)], 4, FP32), repeats=2))
    assert [(row["method"], row["theirs"], row["what"]) for row in rows] == [
        (*pair, what) for pair in peers.ROWS for what in ("step", "alone")
    ]
    for row in rows:
        assert row["ratio"]["n"] == row["our_seconds"]["n"] == row["their_seconds"]["n"] == 2
    assert peers.as_table(rows).row_count == 10


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("method", ["SAM", "F-SAM"])
def test_both_sides_take_the_same_steps(method, foreach):
    """F-SAM's first steps: from then on their mean of gradients is another one than ours."""
    mine, other = workload(MLP), workload(MLP)
    ours, theirs = peers.ours(method, foreach, mine), peers.theirs(method, foreach, other.model)
    before = flat(trainable(mine.model)).clone()
    for optimizer, work, primed in ((ours, mine, False), (theirs, other, True)):
        peers.step_of(optimizer, peers.pass_of(work, optimizer, "step"), primed=primed)()
    moved = [flat(trainable(work.model)) - before for work in (mine, other)]
    assert moved[0].norm() > 0
    if method == "SAM":
        torch.testing.assert_close(moved[0], moved[1], rtol=1e-3, atol=1e-8)


def test_ready_gradients_are_fresh_each_time():
    work = workload(MLP)
    optimizer = peers.ours("SAM", False, work)
    ready = peers.pass_of(work, optimizer, "alone")
    ready()
    first = [parameter.grad for parameter in work.model.parameters()]
    ready()
    for parameter, gradient in zip(work.model.parameters(), first, strict=True):
        assert parameter.grad is not gradient
        assert parameter.grad.equal(parameter)


def test_without_the_peer_one_sentence_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(ConfigurationError, match=r"install pytorch-optimizer==4\.1\.0 or put it on PYTHONPATH"):
        peers.peer()

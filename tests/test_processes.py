"""Tests on several ranks notice ranks that never end."""

import time

import pytest
import torch.distributed as dist

from processes import on_ranks


def waiting(rank, world):
    """The first one waits for the other, which waits as well, without computing."""
    while rank:
        time.sleep(1)
    dist.barrier()


def computing(rank, world):
    while True:
        pass


@pytest.mark.slow
@pytest.mark.parametrize(("world", "function"), [(2, waiting), (1, computing)])
def test_ranks_that_do_not_end_fail(world, function, tmp_path):
    with pytest.raises(pytest.fail.Exception, match="the ranks did not end"):
        on_ranks(world, tmp_path, function, seconds=15, idle=20)

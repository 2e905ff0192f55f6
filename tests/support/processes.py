"""Several gloo processes for tests: each runs a function of its rank, and their results come back."""

import contextlib
import gc
import os
import socket
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from forked import METHOD

SECONDS = 180


def _work(rank, world, port, folder, function):
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=60))
    torch.save(function(rank, world), Path(folder) / f"{rank}.pt")
    # All models are freed before their process group, and no rank leaves while another still communicates with it:
    # otherwise a process may never end.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def _free_port():
    with contextlib.closing(socket.socket()) as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def one_rank():
    """What torchrun tells a process that is alone."""
    return {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(_free_port())}


def on_ranks(world, folder, function, seconds=SECONDS):
    """What `function(rank, world)`, a module-level function, returns on every rank; fails if the ranks do not end."""
    port = _free_port()
    arguments = world, port, str(folder), function
    context = mp.start_processes(_work, arguments, nprocs=world, join=False, start_method=METHOD)
    deadline = time.monotonic() + seconds
    while not context.join(timeout=5):
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            pytest.fail("the ranks did not end")
    return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(world)]

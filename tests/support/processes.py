"""Several gloo processes for tests: each runs a function of its rank, and their results come back.

Limits are in time that the ranks compute, because a busy machine stretches all others.
"""

import contextlib
import gc
import os
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from forked import METHOD

#: Seconds of computing after which a rank is taken to go on for ever.
SECONDS = 900
#: Seconds in which ranks that compute less than `LITTLE` of one are taken to wait for one another.
IDLE = 120
LITTLE = 0.2


def _work(rank, world, port, folder, function, computed):
    threading.Thread(target=_tell, args=(computed, rank), daemon=True).start()
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(hours=1))
    torch.save(function(rank, world), Path(folder) / f"{rank}.pt")
    # All models are freed before their process group, and no rank leaves while another still communicates with it:
    # otherwise a process may never end.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def _tell(computed, rank):
    while True:
        computed[rank] = time.process_time()
        time.sleep(1)


def _free_port():
    with contextlib.closing(socket.socket()) as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def one_rank():
    """What torchrun tells a process that is alone."""
    return {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(_free_port())}


def on_ranks(world, folder, function, seconds=SECONDS, idle=IDLE):
    """What `function(rank, world)`, a module-level function, returns on every rank; fails if the ranks do not end."""
    computed = torch.zeros(world, dtype=torch.float64).share_memory_()
    arguments = (world, _free_port(), str(folder), function, computed)
    context = mp.start_processes(_work, arguments, nprocs=world, join=False, start_method=METHOD)
    before, since = 0.0, time.monotonic()
    while not context.join(timeout=5):
        total, now = float(computed.sum()), time.monotonic()
        if total > before + LITTLE:
            before, since = total, now
        if now > since + idle or float(computed.max()) > seconds:
            for process in context.processes:
                process.kill()
            pytest.fail(f"the ranks did not end; in seconds they have computed {computed.tolist()}")
    return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(world)]

"""From the environment that torchrun sets to a strategy; an error says which command to write instead."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
import torch.distributed as dist

from llqr.lab.errors import EXIT_CODES, ConfigurationError, Diverged, Stopped
from llqr.lab.names import check_known
from llqr.lab.ranks.strategy import STRATEGIES, Strategy
from llqr.lab.ranks.team import FailureElsewhere


def check(strategy: str | None) -> None:
    """Refuse a strategy without several processes, and several processes without a strategy."""
    if strategy is None:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigurationError(
                "--strategy must be given where torchrun starts several processes, each of which would train a copy of "
                f"its own: --strategy {' or '.join(STRATEGIES)}."
            )
        return
    check_known("--strategy", strategy, STRATEGIES)
    if "RANK" not in os.environ:
        raise ConfigurationError(
            f"--strategy {strategy} needs processes that torchrun starts: "
            f"torchrun --nproc-per-node N -m llqr train RECIPE --strategy {strategy}."
        )


def own_device(name: str) -> str:
    """The device of this rank: on a machine with GPUs, the one with its local rank."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if name not in ("auto", "cuda"):
        raise ConfigurationError(f"--device must be auto, cpu or cuda with --strategy, got {name!r}.")
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"


def shard_count(text: str | None, strategy: str | None) -> int | Literal["all"] | None:
    """Among how many ranks to share out a metric."""
    if text is None:
        return None
    if strategy is None:
        raise ConfigurationError("--shards needs --strategy: a metric is shared out among several ranks.")
    if text == "all":
        return "all"
    if not text.isdecimal() or int(text) < 1:
        raise ConfigurationError(f"--shards must be all or a whole number of at least 1, got {text!r}.")
    return int(text)


@contextmanager
def joined(strategy: str | None, device: torch.device) -> Iterator[Strategy]:
    """While entered, this process is one of the ranks that torchrun started."""
    if strategy is None:
        yield Strategy()
        return
    started, terminated = not dist.is_initialized(), signal.getsignal(signal.SIGTERM)
    if started:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    ranks = STRATEGIES[strategy]()
    outcome: int | BaseException | None = None
    try:
        yield ranks
    except FailureElsewhere as error:
        outcome = error.code
    except (Diverged, Stopped) as error:  # on all ranks
        outcome = error if ranks.team.first else EXIT_CODES[type(error)]
    finally:
        if started:
            # torchrun ends the others as soon as one has left with an error; they leave by themselves.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    gc.collect()  # models are freed before their process group
    if started:
        dist.destroy_process_group()
    if isinstance(outcome, BaseException):
        raise outcome
    if outcome is not None:
        sys.exit(outcome)
    signal.signal(signal.SIGTERM, terminated)  # the first rank may go on for a while, with a report

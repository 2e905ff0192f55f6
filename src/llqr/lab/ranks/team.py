"""The processes that make a run together, and how they agree.

Errors must not leave a process waiting for one that is gone: what only some of them do, such as writing files, is done
inside `by_first` or `by_all`, after which an error of one is the error of all.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from llqr.distributed.collectives import all_reduce
from llqr.lab.errors import EXIT_CODES
from llqr.lab.stop import Stop

T = TypeVar("T")
LONGEST_WAIT = timedelta(days=1)
"""For the first rank while it evaluates or writes. A rank that is gone is noticed at once, whatever this is."""


class Team:
    """A single process: there is nobody to agree with."""

    rank = 0
    size = 1

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes files and prints."""
        return self.rank == 0

    def by_first(self, action: Callable[[], T]) -> T:
        """What ``action`` returns on the first rank, on all of them; its error too."""
        return action()

    def by_all(self, action: Callable[[], T]) -> T:
        """What ``action`` returns on this rank, if it succeeds on all of them; otherwise the error of one, on all."""
        return action()

    def gathered(self, own: T) -> list[T]:
        """The values of all ranks, in their order; small objects, or tensors on the host."""
        return [own]

    def mean(self, numbers: Tensor) -> Tensor:
        return numbers

    def agreed(self, stop: Stop) -> Stop:
        """A stop that answers all ranks alike; they must ask equally often and at the same points."""
        return stop

    @contextmanager
    def entered_by_first(self, context: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
        with ExitStack() as stack:

            def enter() -> None:
                stack.enter_context(context())

            self.by_first(enter)
            yield


class Ranks(Team):
    """The ranks of torch's default process group.

    Attributes:
        group: all of them.
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        world = dist.group.WORLD
        assert world is not None
        self.group: dist.ProcessGroup = world
        self._control = dist.new_group(backend="gloo", timeout=LONGEST_WAIT)

    def by_first(self, action: Callable[[], T]) -> T:
        result, error = _outcome(action) if self.first else (None, None)
        sent: list[Any] = [(result, _told(error))]
        dist.broadcast_object_list(sent, src=0, group=self._control)
        result, told = sent[0]
        if failure := error or told:
            raise failure
        return cast(T, result)

    def by_all(self, action: Callable[[], T]) -> T:
        result, error = _outcome(action)
        told = [other for other in self.gathered(_told(error)) if other is not None]
        if failure := error or next(iter(told), None):
            raise failure
        return cast(T, result)

    def gathered(self, own: T) -> list[T]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, own, group=self._control)
        return found

    def mean(self, numbers: Tensor) -> Tensor:
        total = numbers / self.size
        all_reduce(total, self.group)
        return total

    def agreed(self, stop: Stop) -> Stop:
        return AgreedStop(stop, self, self._control)


class AgreedStop(Stop):
    """Requested on all ranks as soon as it is on one.

    It answers the previous question: that answer travelled while the device computed, so that no step waits for it.
    """

    def __init__(self, own: Stop, ranks: Ranks, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._own, self._ranks, self._group = own, ranks, group
        self._flag = torch.zeros(())
        self._answer: dist.Work | None = None

    @property
    def requested(self) -> bool:
        if self.reason:
            return True
        if self._answer is not None:
            self._answer.wait()
            if self._flag:
                self.reason = next(reason for reason in self._ranks.gathered(self._own.reason) if reason)
                return True
        self._flag.fill_(self._own.requested)
        self._answer = dist.all_reduce(self._flag, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return False


class FailureElsewhere(RuntimeError):
    """Another rank failed, and has reported its error.

    Attributes:
        code: that rank's exit code.
    """

    def __init__(self, sentence: str, code: int) -> None:
        super().__init__(sentence, code)
        self.code = code


def _outcome(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return action(), None
    except Exception as error:  # whatever it is, the other ranks are waiting
        return None, error


def _told(error: Exception | None) -> Exception | None:
    """The error as the other ranks raise it."""
    if error is None:
        return None
    code = next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 1)
    return FailureElsewhere(f"another rank failed ({type(error).__name__}: {error})", code)

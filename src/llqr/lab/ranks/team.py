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
    """The ranks of a process group; without one, a single process that agrees with itself."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank, self.size = (0, 1) if group is None else (dist.get_rank(), dist.get_world_size())
        self._control = None if group is None else dist.new_group(backend="gloo", timeout=LONGEST_WAIT)

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes files and prints."""
        return self.rank == 0

    def gathered(self, own: T) -> list[T]:
        """The values of all ranks, in their order; small objects, or tensors on the host."""
        if self.group is None:
            return [own]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, own, group=self._control)
        return found

    def by_first(self, action: Callable[[], T]) -> T:
        """What ``action`` returns on the first rank, on all of them; its error too."""
        result, error = _outcome(action) if self.first else (None, None)
        result, told = self.gathered((result, _told(error)))[0]
        if failure := error or told:
            raise failure
        return cast(T, result)

    def by_all(self, action: Callable[[], T]) -> T:
        """What ``action`` returns on this rank, if it succeeds on all of them; otherwise the error of one, on all."""
        result, error = _outcome(action)
        told = [other for other in self.gathered(_told(error)) if other is not None]
        if failure := error or next(iter(told), None):
            raise failure
        return cast(T, result)

    def mean(self, numbers: Tensor) -> Tensor:
        """The mean over all ranks."""
        if self.group is None:
            return numbers
        total = numbers / self.size
        all_reduce(total, self.group)
        return total

    def agreed(self, stop: Stop) -> Stop:
        """A stop that answers all ranks alike; they must ask equally often and at the same points."""
        return stop if self._control is None else AgreedStop(stop, self, self._control)

    @contextmanager
    def entered_by_first(self, context: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
        """While entered, the first rank is in ``context``."""
        with ExitStack() as stack:

            def enter() -> None:
                stack.enter_context(context())

            self.by_first(enter)
            yield


class AgreedStop(Stop):
    """Requested on all ranks as soon as it is on one.

    It answers the previous question: that answer travelled while the device computed, so that no step waits for it.
    """

    def __init__(self, own: Stop, team: Team, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._own, self._team, self._group = own, team, group
        self._flag = torch.zeros(())
        self._answer: dist.Work | None = None

    @property
    def requested(self) -> bool:
        if self.reason:
            return True
        if self._answer is not None:
            self._answer.wait()
            if self._flag:
                self.reason = next(reason for reason in self._team.gathered(self._own.reason) if reason)
                return True
        self._flag.fill_(self._own.requested)
        self._answer = dist.all_reduce(self._flag, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return False


class FailureElsewhere(RuntimeError):
    """Another rank failed with this exit ``code``, and has reported its error."""

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

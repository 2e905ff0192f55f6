"""What the metric is learned from: one batch per refresh."""

from collections.abc import Callable, Iterator

from llqr.lab.data import Batches
from llqr.lab.tasks import Batch, Task


class InnerBatches:
    """Epoch after epoch from its own loader; of each batch a process takes its ``share``."""

    def __init__(self, task: Task, batch_size: int, seed: int, share: Callable[[Batch], Batch]) -> None:
        self.batches: Batches = task.inner_batches(batch_size, seed)
        self._share = share
        self._rest: Iterator[Batch] = iter(())

    def next(self) -> Batch:
        for batch in self._rest:
            return self._share(batch)
        self._rest = iter(self.batches)
        return self._share(next(self._rest))

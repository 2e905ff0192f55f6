"""The order of an epoch, and how to resume in the middle of one.

All randomness of an epoch (order and augmentation of the samples) is drawn at its start from one generator. The state
of a loader is therefore small: the generator's state at the start of the epoch, and the position in it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from llqr.lab.errors import ConfigurationError

Batch = tuple[Any, Tensor]
"""Inputs, one tensor or a tuple of them as the model takes them, and targets."""


class Batches(ABC):
    """Batches ``(inputs, targets)`` of one data set; iterating yields the rest of the current epoch.

    ``last`` says what happens to the samples that do not fill a whole batch:

    * ``"fill"`` completes the last batch with samples from the start of the epoch's order: all batches have one shape,
      as captured CUDA graphs need, every sample is used, and an epoch has as many steps as with ``"keep"``;
    * ``"drop"`` leaves them out of this epoch;
    * ``"keep"`` makes a smaller last batch.

    With a ``seed`` the order is drawn from a generator on ``drawn_on``, and a second iteration continues where the
    first one stopped. Without one every iteration starts at the beginning and there is no state.
    """

    def __init__(
        self, count: int, batch_size: int, *, seed: int | None, last: str, drawn_on: torch.device | str = "cpu"
    ) -> None:
        if last == "drop" and count < batch_size:
            raise ConfigurationError(
                f"batch_size must be at most the {count} samples of the data, of which whole batches are made "
                f"(training.last=drop), got {batch_size}."
            )
        self.count, self.batch_size, self.last, self.shuffle = count, batch_size, last, seed is not None
        self.generator = torch.Generator(drawn_on)
        if seed is not None:
            self.generator.manual_seed(seed)
        self.steps = count // batch_size if last == "drop" else -(-count // batch_size)
        self.epoch = 0  # number of epochs begun
        self.position = self.steps  # number of batches of this epoch already yielded
        self._epoch_start = self.generator.get_state()

    def __len__(self) -> int:
        """The number of batches per epoch."""
        return self.steps

    def __iter__(self) -> Iterator[Batch]:
        if not self.shuffle:
            yield from self._produce(self._extended(torch.arange(self.count)), 0)
            return
        if self.position == self.steps:
            self._epoch_start = self.generator.get_state()
            self._order = self._plan()
            self.epoch, self.position = self.epoch + 1, 0
        for batch in self._produce(self._order, self.position):
            # Counted before it is used, so that a state saved after the step includes that step.
            self.position += 1
            yield batch

    def _plan(self) -> Tensor:
        """Draw the order of an epoch, then its augmentation."""
        device = self.generator.device
        order = self._extended(torch.randperm(self.count, generator=self.generator, device=device))
        self._draw(len(order))
        return order

    def _extended(self, order: Tensor) -> Tensor:
        """The order, cut off or filled up as ``last`` says."""
        if self.last == "keep":
            return order
        return order[torch.arange(self.steps * self.batch_size, device=order.device) % self.count]

    @abstractmethod
    def _draw(self, total: int) -> None:
        """Draw the augmentation of the ``total`` samples of an epoch, in its order, from the generator."""

    @abstractmethod
    def _produce(self, order: Tensor, first: int) -> Iterator[Batch]:
        """The batches of an epoch with this order, from batch number ``first`` on."""

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to continue with the next batch: plain numbers and one tensor."""
        state = {"epoch": self.epoch, "position": self.position, "generator": self._epoch_start}
        return state | self._described()

    def _described(self) -> dict[str, Any]:
        """What a loader must have in common with the one whose state it continues."""
        return {"count": self.count, "batch_size": self.batch_size, "last": self.last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the loader that saved ``state`` was; data and batch size must be the same."""
        for key, own in self._described().items():
            if state[key] != own:
                raise ValueError(f"The saved loader had {key}={state[key]!r}, this one has {own!r}.")
        saved = state["generator"].cpu()
        if saved.shape != self.generator.get_state().shape:
            raise ValueError(
                f"The saved loader drew its order on another kind of device than {self.generator.device}; "
                "a run can only be resumed on the kind of device it was started on."
            )
        self.generator.set_state(saved)
        self._epoch_start, self.epoch, self.position = saved, state["epoch"], state["position"]
        if self.epoch > 0:
            self._order = self._plan()


class ImageData:
    """A training and a test set of images; batches take ``device=`` and ``memory_format=``."""

    _batches: ClassVar[Callable[..., Batches]]
    """Makes training batches with a seed, test batches without one."""

    def train_batches(self, batch_size: int, *, seed: int, last: str = "fill", **placement: Any) -> Batches:
        """Shuffled, augmented batches; ``seed`` determines order and augmentation."""
        return type(self)._batches(self, batch_size, seed, last, **placement)

    def test_batches(self, batch_size: int, **placement: Any) -> Batches:
        """All test images in order, each once; the last batch may be smaller. ``split="valid"``: those held out."""
        return type(self)._batches(self, batch_size, None, "keep", **placement)

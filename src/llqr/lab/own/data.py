"""A user's data as batches that a run can be resumed with: drawn from a data set, or read from a loader as it is."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset, default_collate

from llqr.curvature.batch import samples_in, split_batch
from llqr.lab.data.batches import Batches
from llqr.lab.errors import ConfigurationError

Pair = tuple[Any, Any]


@contextmanager
def seeded(seed: int, *generators: torch.Generator) -> Iterator[None]:
    """Inside, the generators of torch, numpy and `random`, and these ones, start at ``seed``; then restore them."""
    own = [torch.default_generator, *generators]
    states = [generator.get_state() for generator in own]
    others = random.getstate(), np.random.get_state()  # noqa: NPY002  # the generator that user code draws from
    for generator in own:
        generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    try:
        yield
    finally:
        for generator, state in zip(own, states, strict=True):
            generator.set_state(state)
        random.setstate(others[0])
        np.random.set_state(others[1])  # noqa: NPY002


@dataclass(frozen=True)
class Place:
    """Where batches are used, and whether images lie in memory with their channels last."""

    device: torch.device
    channels_last: bool = False

    def pair(self, batch: Any) -> Pair:
        """Split a batch into inputs and targets, and move them."""
        batch = dict(batch) if isinstance(batch, Mapping) else batch  # tokenizers return classes of their own
        try:
            return split_batch(pytree.tree_map_only(Tensor, self._moved, batch))
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"{error}; a collate_fn of the DataLoader can make one.") from error

    def _moved(self, tensor: Tensor) -> Tensor:
        last = self.channels_last and tensor.ndim == 4
        memory_format = torch.channels_last if last else torch.preserve_format
        return tensor.to(self.device, non_blocking=True, memory_format=memory_format)


def rows(batch: Any) -> int:
    """Count the samples of a batch."""
    count = samples_in(batch)
    if count is None:
        raise ConfigurationError("A batch must hold a tensor with a first dimension, which counts its samples.")
    return count


@dataclass(frozen=True)
class Samples:
    """A data set from which batches of any size are drawn, and how its samples are joined."""

    dataset: Any
    collate: Callable[[list[Any]], Any] = default_collate
    workers: int = 0

    def __len__(self) -> int:
        return len(self.dataset)

    def loader(self, requests: Iterable[tuple[int, list[int]]], device: torch.device) -> DataLoader[Any]:
        """Load the batches of ``requests``: each a seed, which decides the augmentation, and indices."""
        whole = type(self.dataset) is TensorDataset and self.collate is default_collate
        return DataLoader(
            _Requested(self.dataset, whole),
            batch_sampler=requests,  # type: ignore[arg-type]  # a batch is not a list of indices here
            collate_fn=_unchanged if whole else self.collate,
            num_workers=self.workers,
            pin_memory=device.type == "cuda",
            generator=torch.Generator(),  # otherwise it would draw from the global generator
        )


class _Requested(Dataset[Any]):
    """A data set whose random augmentation is decided by the seed of the batch, in whatever process it is made."""

    def __init__(self, dataset: Any, whole: bool) -> None:
        self.dataset, self.whole = dataset, whole

    def __getitems__(self, request: tuple[int, list[int]]) -> Any:
        seed, indices = request
        with seeded(seed):
            if self.whole:
                return list(self.dataset[indices])  # tensors are indexed at once
            return [self.dataset[index] for index in indices]


def _unchanged(batch: Any) -> Any:
    return batch


class SampleBatches(Batches):
    """Shuffled batches of a data set."""

    def __init__(self, samples: Samples, batch_size: int, *, seed: int, last: str, place: Place) -> None:
        super().__init__(len(samples), batch_size, seed=seed, last=last)
        self._samples, self._place = samples, place

    def _draw(self, total: int) -> None:
        self._seeds = torch.randint(2**62, (self.steps,), generator=self.generator).tolist()

    def _produce(self, order: Tensor, first: int) -> Iterator[Pair]:
        parts = [part.tolist() for part in order.split(self.batch_size)]
        requests = list(zip(self._seeds, parts, strict=True))[first:]
        return map(self._place.pair, self._samples.loader(requests, self._place.device))


class LoaderBatches(Batches):
    """The batches of a loader as it makes them; to resume in an epoch, its first batches are read again.

    To the base class, a batch is a sample.
    """

    def __init__(self, loader: Any, *, seed: int, place: Place) -> None:
        super().__init__(len(loader), 1, seed=seed, last="keep")
        self._loader, self._place = loader, place

    def _draw(self, total: int) -> None:
        self._seed = int(torch.randint(2**62, (), generator=self.generator))

    def _produce(self, order: Tensor, first: int) -> Iterator[Pair]:
        found = islice(read(self._loader, self._seed), self.steps)
        position = -1
        for position, batch in enumerate(found):
            if position >= first:
                yield self._place.pair(batch)
        if position + 1 < self.steps:
            raise ConfigurationError(f"train gave {position + 1} batches, and its length says {self.steps}.")


def read(loader: Iterable[Any], seed: int) -> Iterator[Any]:
    """Iterate over a loader once; whatever it draws is decided by ``seed`` and the position."""
    holders = (loader, getattr(loader, "sampler", None))
    generators = [one for holder in holders if isinstance(one := getattr(holder, "generator", None), torch.Generator)]
    with seeded(seed, *generators):
        iterator = iter(loader)
    position = 0
    while True:
        position += 1
        with seeded(seed + position, *generators):
            try:
                batch = next(iterator)
            except StopIteration:
                return
        yield batch


def understood(name: str, data: Any, workers: int = 0) -> Samples | Any:
    """Return ``data`` as samples to draw batches from, or as a loader with a length, to be read as it is.

    A `DataLoader` that only shuffles is taken apart, so that batches of other sizes can be drawn from its data set.
    """
    pair = (
        isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(one, Tensor | np.ndarray) for one in data)
    )
    if pair and len(data[0]) != len(data[1]):
        raise ConfigurationError(f"{name} has {len(data[0])} inputs and {len(data[1])} targets.")
    found: Any = data
    if pair:
        found = Samples(TensorDataset(*map(torch.as_tensor, data)), workers=workers)
    elif isinstance(data, DataLoader):
        shuffles = type(data.sampler) is RandomSampler and not data.sampler.replacement and data.batch_size is not None
        found = Samples(data.dataset, data.collate_fn, data.num_workers) if shuffles else data
    elif isinstance(data, IterableDataset | Mapping | str) or not hasattr(data, "__len__"):
        kind = "None" if data is None else type(data).__name__
        raise ConfigurationError(
            f"{name} must be a Dataset, a DataLoader, a pair of tensors or a list of batches, got {kind}."
        )
    elif not isinstance(data, Sequence) and hasattr(data, "__getitem__"):
        found = Samples(data, workers=workers)
    try:
        empty = not len(found)
    except TypeError as error:
        raise ConfigurationError(f"{name} has no length: give its IterableDataset a __len__.") from error
    if empty:
        raise ConfigurationError(f"{name} is empty.")
    return found

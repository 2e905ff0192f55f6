"""A user's data as batches that a run can be resumed with: drawn from a data set, or read from a loader as it is."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy import ndarray
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset, default_collate

from llqr.curvature.batch import samples_in, split_batch
from llqr.lab.data.batches import Batches
from llqr.lab.errors import ConfigurationError
from llqr.lab.tasks.own import fingerprint
from llqr.lab.tasks.own.random_states import RandomStates

Pair = tuple[Any, Any]
SAMPLED = 8
"""So many samples of a data set stand for all of them in its fingerprint."""


@dataclass(frozen=True)
class Place:
    """Where batches are used, and whether images lie in memory with their channels last."""

    device: torch.device
    channels_last: bool = False

    def moved(self, tensor: Tensor) -> Tensor:
        last = self.channels_last and tensor.ndim == 4
        memory_format = torch.channels_last if last else torch.preserve_format
        return tensor.to(self.device, non_blocking=True, memory_format=memory_format)


def as_pair(batch: Any, place: Place) -> Pair:
    """A batch as inputs and targets where they are used."""
    if isinstance(batch, Mapping):
        batch = dict(batch)  # tokenizers return classes of their own
    try:
        return split_batch(pytree.tree_map_only(Tensor, place.moved, batch))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{error}; a collate_fn of the DataLoader can make one.") from error


def rows(batch: Any) -> int:
    """How many samples a batch has."""
    count = samples_in(batch)
    if count is None:
        raise ConfigurationError(
            "A batch holds no tensor with a first dimension, so that its samples cannot be counted."
        )
    return count


@dataclass(frozen=True)
class Samples:
    """Data whose batches the laboratory draws by itself, in any size: a data set, and how its samples are joined."""

    dataset: Dataset[Any]
    collate: Callable[[list[Any]], Any] = default_collate
    workers: int = 0

    @property
    def count(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # a data set without a length is no Samples

    def loader(self, requests: Iterable[Any], device: torch.device) -> DataLoader[Any]:
        """Batches as ``requests`` say: each a seed and the numbers of the samples."""
        whole = type(self.dataset) is TensorDataset and self.collate is default_collate
        return DataLoader(
            _Requested(self.dataset, whole),
            batch_sampler=requests,
            collate_fn=_unchanged if whole else self.collate,
            num_workers=self.workers,
            pin_memory=device.type == "cuda",
            generator=torch.Generator(),  # otherwise it would draw from the global generator
        )


class _Requested(Dataset[Any]):
    """A data set whose random augmentation is decided by the seed of the batch, in whatever process it is made."""

    def __init__(self, dataset: Dataset[Any], whole: bool) -> None:
        self.dataset, self.whole = dataset, whole

    def __getitems__(self, request: tuple[int, list[int]]) -> Any:
        seed, numbers = request
        with RandomStates(seed).inside():
            if self.whole:
                return list(self.dataset[numbers])  # type: ignore[index]  # tensors are indexed at once
            several = getattr(self.dataset, "__getitems__", None)
            return several(numbers) if several else [self.dataset[number] for number in numbers]


def _unchanged(batch: Any) -> Any:
    return batch


class SampleBatches(Batches):
    """Shuffled batches of a data set."""

    def __init__(self, samples: Samples, batch_size: int, *, seed: int, last: str, place: Place) -> None:
        super().__init__(samples.count, batch_size, seed=seed, last=last)
        self._samples, self._place = samples, place

    def _draw(self, total: int) -> None:
        self._seeds = torch.randint(2**62, (self.steps,), generator=self.generator).tolist()

    def _produce(self, order: Tensor, first: int) -> Iterator[Pair]:
        parts = order.split(self.batch_size)
        requests = [(seed, part.tolist()) for seed, part in zip(self._seeds, parts, strict=True)]
        for batch in self._samples.loader(requests[first:], self._place.device):
            yield as_pair(batch, self._place)


class LoaderBatches(Batches):
    """The batches of a loader as it makes them, in epochs of its length; a position is found again by reading up to it.

    To the base class, a batch is a sample.
    """

    def __init__(self, loader: Iterable[Any], *, seed: int, place: Place) -> None:
        super().__init__(length(loader), 1, seed=seed, last="keep")
        self._loader, self._place = loader, place

    def _draw(self, total: int) -> None:
        self._seed = int(torch.randint(2**62, (), generator=self.generator))

    def _produce(self, order: Tensor, first: int) -> Iterator[Pair]:
        for position, batch in enumerate(self._read()):
            if position == self.steps:
                return
            if position >= first:
                yield as_pair(batch, self._place)

    def _read(self) -> Iterator[Any]:
        """The loader's batches, pass after pass: it may give fewer than its length says."""
        states = RandomStates(self._seed, own_generators(self._loader))
        while True:
            empty = True
            for batch in read_once(self._loader, states):
                empty = False
                yield batch
            if empty:
                raise ConfigurationError("train gave no batch.")


def read_once(loader: Iterable[Any], states: RandomStates) -> Iterator[Any]:
    """One pass over a loader, which draws from these states only."""
    with states.inside():
        iterator = iter(loader)
    while True:
        with states.inside():
            try:
                batch = next(iterator)
            except StopIteration:
                return
        yield batch


def own_generators(loader: Any) -> list[torch.Generator]:
    """The generators that a `DataLoader` was given."""
    holders = (
        loader,
        getattr(loader, "sampler", None),
        getattr(getattr(loader, "batch_sampler", None), "sampler", None),
    )
    found = [getattr(holder, "generator", None) for holder in holders]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())


def first(data: Samples | Iterable[Any]) -> Any:
    """A sample, or the first batch of a loader; None if there is none."""
    if isinstance(data, Samples):
        with RandomStates(0).inside():
            return data.dataset[0]
    return next(read_once(data, RandomStates(0, own_generators(data))), None)


def fingerprint_of(data: Samples | Iterable[Any]) -> str:
    """Changes with the data: with any number of tensors, otherwise with a few samples or the first batch."""
    if not isinstance(data, Samples):
        return fingerprint.of_data(data, lambda: first(data))
    if type(data.dataset) is TensorDataset:
        return fingerprint.of_texts(map(fingerprint.of_tensor, data.dataset.tensors))
    places = torch.linspace(0, data.count - 1, min(data.count, SAMPLED)).long().tolist()

    def some() -> list[Any]:
        with RandomStates(0).inside():
            return [data.dataset[place] for place in places]

    return fingerprint.of_data(data.dataset, some)


def length(loader: Any) -> int:
    try:
        return len(loader)
    except TypeError as error:
        raise ConfigurationError(
            "train has no length: give it a __len__ (that of an IterableDataset counts samples), or a list of batches."
        ) from error


def understood(name: str, data: Any, workers: int) -> Samples | Iterable[Any]:
    """What a user gave as ``name``: samples to draw batches from, or a loader to be read as it is.

    A `DataLoader` that only shuffles is taken apart, so that batches of other sizes can be drawn from its data set.
    """
    if isinstance(data, DataLoader):
        found: Samples | Iterable[Any] = data
        if _only_shuffles(data):
            found = Samples(data.dataset, data.collate_fn, data.num_workers)
    elif isinstance(data, IterableDataset):
        raise ConfigurationError(f"{name} must be put into a DataLoader: an IterableDataset has no batches of its own.")
    elif isinstance(data, Mapping):
        raise ConfigurationError(f"{name} is a mapping, which may be a batch: give a list of batches, or a Dataset.")
    elif isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(part, Tensor | ndarray) for part in data):
        if len(data[0]) != len(data[1]):
            raise ConfigurationError(f"{name} has {len(data[0])} inputs and {len(data[1])} targets.")
        found = Samples(TensorDataset(*map(torch.as_tensor, data)), default_collate, workers)
    elif isinstance(data, Sequence) and not isinstance(data, str):
        found = data
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        found = Samples(data, default_collate, workers)
    elif isinstance(data, Iterator):
        raise ConfigurationError(
            f"{name} is a {type(data).__name__}, which can be read only once; give the DataLoader or the list itself."
        )
    elif isinstance(data, Iterable):
        found = data
    else:
        kind = "None" if data is None else type(data).__name__
        raise ConfigurationError(f"{name} must be a Dataset, a DataLoader or a list of batches, got {kind}.")
    if (isinstance(found, Samples) and found.count == 0) or (isinstance(found, Sequence) and not found):
        raise ConfigurationError(f"{name} is empty.")
    return found


def _only_shuffles(loader: DataLoader[Any]) -> bool:
    if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None or loader.worker_init_fn is not None:
        return False
    return type(loader.sampler) is RandomSampler and not loader.sampler.replacement

"""`geometry.batches`: no `batch=` in a step, and a resumed run draws the same ones."""

import copy
import functools
import io
from collections import UserDict
from itertools import islice

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import llqr
from llqr.batches import BatchSource
from traps.training import assert_same_bits, assert_same_state, batches, closure_of, mlp, quick_geometry, sgd, weights


def dataset(rows=48):
    draw = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(rows, 5, generator=draw), torch.randint(3, (rows,), generator=draw))


def steps(opt, model, data):
    for batch in data:
        opt.step(closure_of(opt, model, batch))


def generated():
    for i in torch.randperm(6).tolist():
        yield batches(6, size=8)[i]


SOURCES = {
    "list": lambda: batches(3, size=8),
    "loader": lambda: DataLoader(dataset(), batch_size=8),
    "shuffled": lambda: DataLoader(dataset(), batch_size=8, shuffle=True),
    "function": lambda: lambda: batches(1, size=8)[0],
    "generator": lambda: generated,
}


@pytest.mark.parametrize("source", SOURCES)
def test_steps_without_a_batch(source):
    model, data = mlp(), batches(7)
    geometry = quick_geometry(model, every=1)
    geometry.batches = SOURCES[source]()
    steps(llqr.LLQRSAM(sgd(model), geometry, rho=0.05), model, data)
    assert geometry.refreshes == 7


def test_they_are_drawn_in_order_over_and_over_and_only_when_due():
    model, data, drawn = mlp(), batches(9), []

    class Source:
        def __iter__(self):
            for i, batch in enumerate(batches(2, size=8)):
                drawn.append(i)
                yield batch

    geometry = quick_geometry(model, every=2)
    geometry.batches = Source()
    opt = llqr.LLQR(sgd(model), geometry)
    steps(opt, model, data)
    assert drawn == [0, 1, 0, 1, 0]
    opt.step(closure_of(opt, model, data[0]), batch=data[0])  # a batch that is given comes first
    assert len(drawn) == 5


def test_a_loader_with_persistent_workers_may_be_that_of_the_training_loop():
    model, rows = mlp(), torch.arange(30.0).repeat(5, 1).T
    loader = DataLoader(TensorDataset(rows, torch.zeros(30).long()), 5, num_workers=1, persistent_workers=True)
    geometry = quick_geometry(model, every=2)
    geometry.batches = loader
    opt = llqr.LLQR(sgd(model), geometry)
    for _ in range(2):
        seen = []
        for batch in islice(loader, 7):
            seen.append(int(batch[0][0, 0]))
            opt.step(closure_of(opt, model, batch))
        assert seen == [0, 5, 10, 15, 20, 25]


def begun():
    torch.manual_seed(3)
    model = mlp()
    return model, llqr.LLQRSAM(sgd(model), quick_geometry(model, every=1), rho=0.05)


@functools.cache
def trained_straight(source):
    model, opt = begun()
    opt.geometry.batches = SOURCES[source]()
    steps(opt, model, batches(10))
    return model, opt


@pytest.mark.parametrize("source", ["loader", "shuffled", "generator"])
@pytest.mark.parametrize("before", [5, 6, 8])  # in the first pass over a loader, at its end, in the second one
@pytest.mark.parametrize("order", ["batches first", "state first"])
def test_a_resumed_run_draws_the_same(source, before, order):
    data, straight, first = batches(10), trained_straight(source), begun()
    first[1].geometry.batches = SOURCES[source]()
    steps(first[1], first[0], data[:before])
    file = io.BytesIO()
    torch.save([part.state_dict() for part in first] + [torch.get_rng_state()], file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second = begun()
    for i in range(2):
        if (i == 0) == (order == "batches first"):
            second[1].geometry.batches = SOURCES[source]()
        else:
            for part, state in zip(second, saved, strict=False):
                part.load_state_dict(state)
    torch.set_rng_state(saved[2])
    steps(second[1], second[0], data[before:])
    assert_same_bits(weights(second[0]), weights(straight[0]))
    assert_same_state(second[1].state_dict(), straight[1].state_dict())


class Augmented(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + torch.rand(()), y


def test_a_resumed_run_draws_the_same_from_persistent_workers():
    """Which go on with their random numbers in a second pass over the data."""

    def source():
        made = BatchSource()
        data = Augmented(*dataset(8).tensors)
        made.draw_from(DataLoader(data, 4, shuffle=True, num_workers=1, persistent_workers=True))
        return made

    straight, device = source(), torch.device("cpu")
    for seed in range(3):
        straight.draw(None, device, seed)
    resumed = source()
    resumed.load(straight.state())
    (x, y), (expected, labels) = resumed.draw(None, device, 3), straight.draw(None, device, 3)
    assert x.equal(expected)
    assert y.equal(labels)


class Resumable:
    """As torchdata's `StatefulDataLoader`: its state is that of the iterator that was made last."""

    def __init__(self):
        self._iterator, self.next_iter_state = None, None

    def _get_iterator(self):
        torch.rand(())  # a seed for its workers
        return ResumableIterator(self.next_iter_state or 0)

    def __iter__(self):
        self._iterator, self.next_iter_state = self._get_iterator(), None
        return self._iterator

    def state_dict(self):
        self._iterator = self._iterator or self._get_iterator()
        return {"position": self._iterator.position}

    def load_state_dict(self, state):
        self._iterator = None
        if state:
            self.next_iter_state = state["position"]


class ResumableIterator:
    def __init__(self, position):
        self.position = position

    def __iter__(self):
        return self

    def __next__(self):
        self.position += 1
        if self.position > 6:
            raise StopIteration
        return batches(self.position, size=8)[-1]


@pytest.mark.parametrize("copied", [False, True])
def test_a_resumable_loader_may_be_that_of_the_training_loop(copied):
    def run():
        (model, opt), loader = begun(), Resumable()
        opt.geometry.batches = loader
        return model, opt, loader

    straight, first, second = run(), run(), run()
    steps(straight[1], straight[0], islice(straight[2], 5))
    torch.manual_seed(5)
    steps(first[1], first[0], islice(first[2], 3))
    random = torch.get_rng_state()
    for part, resumed in zip(first, second, strict=True):
        resumed.load_state_dict(part.state_dict())
    assert torch.get_rng_state().equal(random)
    if copied:
        second = copy.deepcopy(second)
    steps(second[1], second[0], islice(second[2], 2))
    assert_same_bits(weights(second[0]), weights(straight[0]))
    second[1].load_state_dict(first[1].state_dict())  # and once more, after it has drawn
    assert second[1].geometry.state_dict()["batches"]["position"] == 3
    second[1].geometry.refresh()
    assert second[1].geometry.state_dict()["batches"]["position"] == 4


def test_drawing_leaves_the_random_state_alone():
    model, before = mlp(), torch.get_rng_state()
    geometry = quick_geometry(model)
    before = torch.get_rng_state()
    geometry.batches = DataLoader(dataset(), batch_size=8, shuffle=True)
    geometry.refresh()
    assert torch.get_rng_state().equal(before)


def test_every_refresh_draws_other_numbers_although_the_random_state_is_left_alone():
    """A loop that draws no numbers of its own does not let the state go on between two refreshes."""
    drawn = []

    def sampled():
        drawn.append(float(torch.rand(())))
        return batches(1, size=8)[0]

    class Epochs:
        def __iter__(self):
            yield sampled()

    model, (batch,) = mlp(), batches(1)
    for given, source in ((None, sampled), (None, Epochs()), (sampled, None)):
        geometry = quick_geometry(model, every=1)
        geometry.batches = source
        opt = llqr.LLQR(sgd(model), geometry)
        drawn.clear()
        for _ in range(3):
            opt.step(closure_of(opt, model, batch), batch=given)
        assert len(set(drawn)) == 3


class Encoding(UserDict):
    """What tokenizers return."""

    def to(self, device):
        return Encoding({name: value.to(device) for name, value in self.items()})


class Named(nn.Linear):
    def forward(self, x, scale):
        return super().forward(scale * x)


def test_inputs_of_any_class_beside_the_targets():
    torch.manual_seed(0)
    model = Named(5, 3)
    traced, plain = (quick_geometry(model, **own) for own in ({"engine": "linearised"}, {}))
    for x, y in batches(2):
        for geometry in (traced, plain):
            geometry.refresh((Encoding(x=x, scale=torch.tensor(0.5)), y))
    torch.testing.assert_close(traced.metric.named_factors(), plain.metric.named_factors())


def test_inputs_of_any_class_are_moved():
    x, y = batches(1)[0]
    source = BatchSource()
    source.draw_from([(Encoding(x=x), y)])
    inputs, targets = source.draw(None, torch.device("meta"), 0)
    assert inputs["x"].is_meta
    assert targets.is_meta


def test_mappings_of_any_class():
    model = nn.Sequential(nn.Linear(5, 3))
    model.forward = lambda x: nn.Sequential.forward(model, x)
    geometry = quick_geometry(model)
    x, y = batches(1)[0]
    geometry.batches = [Encoding(x=x, labels=y)]
    assert geometry.refresh().accepted


def test_what_is_no_source_is_named():
    geometry = quick_geometry(mlp())
    with pytest.raises(TypeError, match="batches: expected an iterable of batches or a function, got int"):
        geometry.batches = 3
    geometry.batches = iter(batches(1))
    geometry.refresh()
    with pytest.raises(ValueError, match="batches: there are none"):
        geometry.refresh()
    geometry.batches = None
    with pytest.raises(TypeError, match=r"geometry\.batches"):
        geometry.refresh()


def seeded():
    return torch.Generator().manual_seed(1)


LOADERS = {
    "shuffle": lambda data: DataLoader(data, batch_size=4, shuffle=True, generator=seeded()),
    "sampler": lambda data: DataLoader(data, batch_size=4, sampler=RandomSampler(data, generator=seeded())),
    "batch sampler": lambda data: DataLoader(
        data, batch_sampler=BatchSampler(RandomSampler(data, generator=seeded()), 4, drop_last=False)
    ),
    "lazy": lambda data: DataLoader(  # draws 32 numbers at a time
        data, batch_size=4, sampler=RandomSampler(data, replacement=True, num_samples=96, generator=seeded())
    ),
}


@pytest.mark.parametrize("loader", LOADERS.values(), ids=LOADERS)
def test_refreshes_leave_a_loaders_own_generator_alone(loader):
    def order(refreshes):
        training = loader(TensorDataset(torch.arange(24.0).view(-1, 1), torch.randint(3, (24,))))
        geometry = llqr.Geometry(nn.Linear(1, 3), nn.functional.cross_entropy)
        geometry.batches = training
        seen = []
        for _ in range(2):
            for x, _ in training:
                if refreshes:
                    geometry.refresh()
                seen.append(x.flatten().tolist())
        return seen

    assert order(refreshes=True) == order(refreshes=False)


@pytest.mark.parametrize("loader", LOADERS.values(), ids=LOADERS)
def test_batches_of_a_loader_with_its_own_generator_resume(loader):
    def drawn(resume):
        torch.manual_seed(0)
        training = loader(TensorDataset(torch.arange(24.0).view(-1, 1)))
        source, seen, trained = BatchSource(), [], iter(training)
        source.draw_from(training)
        for step in range(20):
            next(trained, None)
            if resume and step == 9:
                state, source = source.state(), BatchSource()
                source.draw_from(loader(training.dataset))
                source.load(state)
            seen.append(source.draw(None, torch.device("cpu"), step)[0].flatten().tolist())
        return seen

    assert drawn(resume=True) == drawn(resume=False)

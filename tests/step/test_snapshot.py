"""Contents are put back bit-exact, by one multi-tensor copy per dtype."""

import pytest
import torch

from launches import Launches
from llqr.passes import Snapshot


def mixed():
    """Every dtype twice, with numbers that adding and subtracting would not restore."""
    return [
        torch.tensor([0.1, -0.0, 1e-42]),
        torch.tensor(7),
        torch.tensor([1 / 3, 1e-300], dtype=torch.float64),
        torch.tensor([[2.5, float("nan")]]),
        torch.tensor([True, False]),
        torch.tensor(8),
        torch.tensor([2 / 3], dtype=torch.float64),
        torch.tensor([False]),
    ]


def overwrite(tensors):
    for tensor in tensors:
        tensor.fill_(1 if tensor.dtype == torch.bool else 5)


def bits(tensors):
    return [tensor.contiguous().view(-1).view(torch.uint8).tolist() for tensor in tensors]


def test_contents_are_restored_bit_exact_every_time():
    snapshot, tensors = Snapshot(), mixed()
    for number in range(3):
        tensors[1].fill_(number)
        before = bits(tensors)
        snapshot.take(tensors)
        assert snapshot.held
        overwrite(tensors)
        assert bits(tensors) != before
        snapshot.restore()
        assert not snapshot.held
        assert bits(tensors) == before


def test_one_copy_per_dtype_and_not_one_per_tensor():
    snapshot, tensors = Snapshot(), mixed()
    with Launches() as operators:
        snapshot.take(tensors)
        snapshot.restore()
    assert operators.total == 2 * len({tensor.dtype for tensor in tensors})


def test_other_tensors_of_the_same_form():
    snapshot = Snapshot()
    first, second = torch.zeros(3), torch.ones(3)
    snapshot.take([first])
    snapshot.restore()
    snapshot.take([second])
    first.fill_(5)
    second.fill_(6)
    snapshot.restore()
    assert first.tolist() == [5, 5, 5]
    assert second.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "other",
    [torch.full((4,), 0.1), torch.full((1,), 0.1), torch.full((3,), 0.1, dtype=torch.float64), torch.tensor([1, 2, 3])],
    ids=["larger", "smaller", "float64", "integers"],
)
def test_a_tensor_whose_data_was_replaced(other):
    """By `tensor.data = other`; a copy of the old shape or dtype would lose numbers or digits."""
    snapshot, tensor = Snapshot(), torch.zeros(3)
    snapshot.take([tensor])
    snapshot.restore()
    tensor.data = other.clone()
    snapshot.take([tensor])
    tensor.zero_()
    snapshot.restore()
    assert tensor.equal(other)


def test_nothing_to_remember():
    snapshot = Snapshot()
    snapshot.take([])
    assert snapshot.held
    snapshot.restore()
    assert not snapshot.held

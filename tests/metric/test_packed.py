"""Many tensors are copied with one kernel per kind (dtypes, devices, memory order)."""

import torch

from launches import Launches
from llqr.metric.layout import copy_each


def test_every_kind_is_copied_at_once():
    sources = [torch.randn(4, 3) for _ in range(5)] + [torch.randn(3, 4).t() for _ in range(2)] + [torch.ones(2)]
    targets = [torch.zeros(4, 3, dtype=torch.bfloat16) for _ in range(3)]
    targets += [torch.zeros(source.shape) for source in sources[3:]]
    with Launches() as operators:
        copy_each(targets, sources)
    for target, source in zip(targets, sources, strict=True):
        assert target.equal(source.to(target.dtype))
    # Three that are rounded, three of equal memory order, and two of unequal order, which share no kernel.
    assert operators.by_name == {"_foreach_copy_": 1 + 1 + 2}


def test_a_single_different_memory_order_would_cost_one_kernel_per_tensor():
    sources = [torch.randn(4, 3) for _ in range(5)] + [torch.randn(3, 4).t()]
    with Launches() as operators:
        torch._foreach_copy_([torch.zeros(4, 3) for _ in sources], sources)
    assert operators.by_name["_foreach_copy_"] == 6

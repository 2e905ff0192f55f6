"""Vectors in several parts: small ones are put together, and come apart as they were."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from llqr.inner import objective
from llqr.inner.objective import joined, parted

SHAPES = st.lists(st.integers(1, 7), max_size=3).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.float64])


@given(st.lists(st.tuples(SHAPES, DTYPES), max_size=8), st.sampled_from([1, 20, 2**20]))
def test_what_is_joined_comes_apart_as_it_was(kinds, small):
    parts = [torch.randn(shape, dtype=dtype) for shape, dtype in kinds]
    before, objective.SMALL = objective.SMALL, small
    try:
        bundles = joined(parts)
        found = parted(bundles, parts)
    finally:
        objective.SMALL = before
    assert len(bundles) <= len(parts)
    if small == 2**20:
        assert len(bundles) == len({part.dtype for part in parts})
    for part, again in zip(parts, found, strict=True):
        assert again.dtype == part.dtype
        assert torch.equal(again, part)

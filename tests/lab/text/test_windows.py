"""Windows of one long sequence of tokens: they cover it, and resume in the middle of an epoch."""

import io
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llqr.lab.errors import ConfigurationError
from llqr.lab.text.batches import WindowBatches
from llqr.lab.text.subwords import PAD


@given(length=st.integers(2, 120), rows=st.integers(1, 5), context=st.integers(1, 12))
def test_every_token_but_the_first_is_a_target_once(length, rows, context):
    tokens = torch.arange(10, 10 + length)
    batches = WindowBatches(tokens, rows, context)
    inputs, targets = zip(*batches, strict=True)
    assert all(side.shape == (rows, context) and side.dtype == torch.int64 for side in (*inputs, *targets))
    flat_inputs, flat_targets = (torch.cat(side).flatten() for side in (inputs, targets))
    real = flat_targets != PAD
    assert flat_targets[real].tolist() == tokens[1:].tolist()
    assert (flat_inputs[real] == flat_targets[real] - 1).all()


@given(windows=st.integers(2, 20), extra=st.integers(0, 11), rows=st.integers(1, 5), context=st.integers(1, 12))
def test_training_windows_are_consecutive_from_a_new_offset(windows, extra, rows, context):
    length = windows * context + extra % context
    batches = WindowBatches(torch.arange(10, 10 + length), rows, context, seed=0)
    for _ in range(3):
        inputs, targets = (torch.cat(side) for side in zip(*batches, strict=True))
        assert (targets == inputs + 1).all()
        assert targets.max() < 10 + length
        starts = sorted(set(inputs[:, 0].tolist()))
        assert len(starts) == batches.count == windows - 1
        assert all(b - a == context for a, b in pairwise(starts))


def test_every_offset_occurs():
    batches = WindowBatches(torch.arange(100), 4, 5, seed=0)
    cuts = {min(int(inputs.min()) for inputs, _ in batches) for _ in range(60)}
    assert cuts == set(range(5))


@pytest.mark.parametrize("taken", [1, 3, None])
def test_windows_resume_in_the_middle_of_an_epoch(taken):
    def make():
        return WindowBatches(torch.arange(500), 4, 7, seed=3)

    batches = make()
    list(batches)
    rest = iter(batches)
    for _ in range(len(batches) if taken is None else taken):
        next(rest)
    saved = io.BytesIO()
    torch.save(batches.state_dict(), saved)
    saved.seek(0)
    again = make()
    again.load_state_dict(torch.load(saved, weights_only=True))
    for a, b in zip([*batches, *batches], [*again, *again], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_bad_windows_are_named():
    with pytest.raises(
        ConfigurationError, match="tokens must be at least 8 for a context of 4, got 7; choose a smaller"
    ):
        WindowBatches(torch.arange(7), 1, 4, seed=0)
    with pytest.raises(ValueError, match="The saved loader had context=3, this one has 4"):
        WindowBatches(torch.arange(9), 1, 4).load_state_dict(WindowBatches(torch.arange(9), 1, 3).state_dict())

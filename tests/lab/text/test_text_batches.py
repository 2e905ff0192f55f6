"""Batches of sentence pairs: every pair once, few shapes, the token limit, and resuming in the middle of an epoch."""

import io
from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llqr.lab.errors import ConfigurationError
from llqr.lab.text.batches import GRID, choose, decoding_batches, sentence_batches, token_batches
from llqr.lab.text.prepared import SentencePairs
from llqr.lab.text.subwords import BOS, EOS, PAD

lengths = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=60)


def numbered(sizes):
    """Pairs whose tokens encode which pair they belong to, and their position in it."""
    first = 10
    sides = [
        [torch.tensor([*(first + 100 * i + j for j in range(pair[side])), EOS]).int() for i, pair in enumerate(sizes)]
        for side in range(2)
    ]
    return SentencePairs(*sides)


def random_pairs(count=200, longest=40, seed=0):
    sizes = torch.randint(1, longest, (count, 2), generator=torch.Generator().manual_seed(seed)).tolist()
    return numbered(sizes)


def read(row):
    """The tokens of a padded row up to the end token, after which there is only padding."""
    row = row.tolist()
    if EOS not in row:
        assert set(row) == {PAD}
        return None
    end = row.index(EOS)
    assert set(row[end + 1 :]) <= {PAD}
    return tuple(row[:end])


def rows_of(batches):
    """The pairs of an epoch; checks what holds for every batch."""
    found = []
    for (source, previous), targets in batches:
        assert source.dtype == previous.dtype == targets.dtype == torch.int64
        assert previous.shape == targets.shape
        assert len(source) == len(targets)
        for s, p, t in zip(source, previous, targets, strict=True):
            pair = read(s), read(t)
            if None in pair:
                assert pair == (None, None)
                assert set(p.tolist()) == {PAD}
                continue
            expected = [BOS, *pair[1]]
            assert p.tolist() == expected + [PAD] * (len(t) - len(expected))
            found.append(pair)
    return found


def all_of(pairs):
    return Counter((words(source), words(target)) for source, target in zip(pairs.source, pairs.target, strict=True))


def words(sentence):
    return tuple(sentence.tolist()[:-1])


@given(sizes=lengths, max_tokens=st.integers(31, 200), shapes=st.integers(1, 6), seed=st.none() | st.integers(0, 9))
def test_every_pair_comes_once_in_a_batch_within_the_limit(sizes, max_tokens, shapes, seed):
    pairs = numbered(sizes)
    batches = token_batches(pairs, max_tokens, seed=seed, shapes=shapes)
    made = list(batches)
    assert len(made) == len(batches)
    assert Counter(rows_of(made)) == all_of(pairs)
    seen = {(len(targets), source.shape[1], targets.shape[1]) for (source, _), targets in made}
    assert len(seen) <= shapes
    assert seen == {(shape.rows, shape.source, shape.target) for shape in batches.shapes}
    assert all(rows * max(source, target) <= max_tokens for rows, source, target in seen)


@given(sizes=lengths, max_tokens=st.integers(31, 500))
def test_more_shapes_never_need_more_tokens_than_one(sizes, max_tokens):
    lengths = torch.tensor(sizes) + 1
    one, _ = choose(lengths, max_tokens, 1)
    (only,) = one
    assert (only.source, only.target) == tuple(
        min(-(-int(side.max()) // GRID) * GRID, max_tokens) for side in lengths.T
    )
    several, belongs = choose(lengths, max_tokens, 4)
    padded = torch.tensor([shape.source + shape.target for shape in several])[belongs].sum()
    assert padded <= len(sizes) * (only.source + only.target)
    held = torch.tensor([(shape.source, shape.target) for shape in several])[belongs]
    assert (lengths <= held).all()


def test_shapes_fit_the_sentences():
    """Two groups of sentences and two shapes: no padding beyond the grid."""
    pairs = numbered([(7, 15)] * 64 + [(31, 23)] * 64)
    batches = token_batches(pairs, 1024, shapes=2)
    assert [(shape.source, shape.target, shape.rows) for shape in batches.shapes] == [(8, 16, 64), (32, 24, 32)]
    assert not any((targets == PAD).any() or (source == PAD).any() for (source, _), targets in batches)
    assert len(batches) == 3


def test_pairs_are_spread_evenly_over_the_batches_of_a_shape():
    batches = token_batches(numbered([(7, 7)] * 33), 8 * 16, seed=0)
    real = [int((targets[:, 0] != PAD).sum()) for _, targets in batches]
    assert sorted(real) == [11, 11, 11]
    assert all(len(targets) == 16 for _, targets in batches)


def test_the_seed_decides_the_order_and_epochs_differ():
    pairs = random_pairs()
    one, two, other = (token_batches(pairs, 256, seed=seed) for seed in (1, 1, 2))
    epochs = [rows_of(one) for _ in range(2)]
    assert epochs == [rows_of(two) for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert epochs[0] != rows_of(other)


def test_batches_are_not_sorted_by_length():
    sizes = [source.shape[1] for (source, _), _ in token_batches(random_pairs(2000), 256, seed=0)]
    changes = sum(a != b for a, b in pairwise(sizes))
    assert changes > len(sizes) / 2


@pytest.mark.parametrize("make", [lambda p: token_batches(p, 256, seed=5), lambda p: sentence_batches(p, 7, seed=5)])
@pytest.mark.parametrize("taken", [0, 1, 4, None])
def test_a_saved_state_resumes_in_the_middle_of_an_epoch(make, taken):
    pairs = random_pairs()
    batches = make(pairs)
    rows_of(batches)
    taken = len(batches) if taken is None else taken
    current = iter(batches)
    for _ in range(taken):
        next(current)
    file = io.BytesIO()
    torch.save(batches.state_dict(), file)
    expected = [batch for _ in range(2) for batch in batches] if taken else list(batches)
    again = make(pairs)
    file.seek(0)
    again.load_state_dict(torch.load(file, weights_only=True))
    assert again.position in (taken, len(again))
    found = [batch for _ in range(2) for batch in again] if taken else list(again)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_the_state_of_other_shapes_is_refused():
    state = token_batches(random_pairs(), 256, seed=0).state_dict()
    with pytest.raises(ValueError, match="The saved loader had shapes="):
        token_batches(random_pairs(longest=20), 256, seed=0).load_state_dict(state)


def test_without_a_seed_every_iteration_is_the_same():
    batches = token_batches(random_pairs(), 256)
    assert rows_of(batches) == rows_of(batches)


def test_a_pair_beyond_the_limit_is_named():
    with pytest.raises(
        ConfigurationError, match=r"max_tokens must be at least 21, the length of the longest .*, got 20"
    ):
        token_batches(numbered([(3, 20)]), 20)
    assert len(token_batches(numbered([(3, 20)]), 21)) == 1


def test_sentence_batches_have_one_shape_and_leave_out_the_longest():
    pairs = numbered([(5, 9)] * 96 + [(9, 5)] * 3 + [(30, 30)])
    batches = sentence_batches(pairs, 12, seed=0)
    assert batches.count == 99
    assert {tuple(targets.shape) for _, targets in batches} == {(12, 16)}
    expected = all_of(pairs)
    del expected[(words(pairs.source[99]), words(pairs.target[99]))]
    assert Counter(rows_of(sentence_batches(pairs, 12, seed=0))) == expected
    few = numbered([(5, 9)] * 9 + [(30, 30)])  # of fewer than 100 pairs none is left out
    assert Counter(rows_of(sentence_batches(few, 12, seed=0))) == all_of(few)


@given(sizes=lengths, max_tokens=st.integers(1, 100))
def test_every_sentence_is_decoded_once_and_keeps_its_index(sizes, max_tokens):
    sentences = numbered(sizes).source
    found = {}
    for places, source in decoding_batches(sentences, max_tokens):
        assert source.dtype == torch.int64
        assert len(places) == len(source)
        assert len(places) == 1 or source.numel() <= max_tokens
        found |= {place: list(read(row)) for place, row in zip(places, source, strict=True)}
    assert found == {i: list(words(sentence)) for i, sentence in enumerate(sentences)}

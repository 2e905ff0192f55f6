"""Beam search against an exhaustive search, and against the same search in plain Python, one hypothesis at a time."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from llqr.lab.models.beam import CHECK_EVERY, Hypothesis, beam_search
from llqr.lab.models.transformer import TranslationTransformer
from llqr.lab.text.subwords import BOS, EOS, PAD


def decoder(seed: int, vocabulary: int, sharpness: float = 1.0, towards_the_end: float = 0.0) -> TranslationTransformer:
    """A small model with logits scaled by ``sharpness`` and a high probability of the end token."""
    torch.manual_seed(seed)
    model = TranslationTransformer(vocabulary, width=8, feed_forward=8, heads=2, layers=1, tie="none", max_length=32)
    model = model.double().eval()
    with torch.no_grad():
        model.head.weight.mul_(sharpness)
        # A constant among the outputs of the last norm, which only the row of the end token reads.
        last = model.decoder[0].around_feed_forward.norm
        last.weight[0], last.bias[0] = 0.0, 1.0
        model.head.weight[EOS, 0] = towards_the_end
    return model


def sources(vocabulary: int, *lengths: int) -> Tensor:
    rows = torch.full((len(lengths), max(lengths)), PAD)
    for row, length in zip(rows, lengths, strict=True):
        row[:length] = torch.randint(1, vocabulary, (length,))
    return rows


@torch.no_grad()
def log_probabilities(model: TranslationTransformer, source: Tensor, prefix: tuple[int, ...]) -> Tensor:
    """Of the token after ``prefix``, from a pass over the whole prefix."""
    return model(source.unsqueeze(0), torch.tensor([[BOS, *prefix]]))[0, -1].log_softmax(0)


def limit(source: Tensor, max_length: tuple[float, float]) -> int:
    return int(max_length[0] * int((source != PAD).sum()) + max_length[1])


def best_first(found: list[tuple[list[int], float]]) -> list[Hypothesis]:
    return [Hypothesis(tokens, score) for tokens, score in sorted(found, key=lambda pair: -pair[1])]


def exhaustive(model, source, max_length, penalty) -> list[Hypothesis]:
    """All possible sequences."""
    words = [token for token in range(model.vocabulary) if token not in (PAD, EOS)]
    found = []
    for length in range(1, limit(source, max_length) + 1):
        for sequence in itertools.product(words, repeat=length):
            steps = [*enumerate(sequence), (length, EOS)]
            total = sum(float(log_probabilities(model, source, sequence[:at])[token]) for at, token in steps)
            found.append((list(sequence), total / (length + 1) ** penalty))
    return best_first(found)


def step_by_step(model, source, beam, max_length, penalty) -> list[Hypothesis]:
    """fairseq's rules, written with lists."""
    going_on, finished, last = [((), 0.0)], [], limit(source, max_length)
    for step in range(last + 1):
        candidates = []
        for prefix, total in going_on:
            for token, logp in enumerate(log_probabilities(model, source, prefix).tolist()):
                allowed = token == EOS if step == last else token != EOS or step > 0
                if token != PAD and allowed:
                    candidates.append((total + logp, prefix, token))
        candidates = sorted(candidates, reverse=True)[: 2 * beam]
        for total, prefix, token in candidates[:beam]:
            if token == EOS and len(finished) < beam:
                finished.append((list(prefix), total / (step + 1) ** penalty))
        if len(finished) == beam:
            break
        going_on = [((*prefix, token), total) for total, prefix, token in candidates if token != EOS][:beam]
    return best_first(finished)


def assert_same(found: list[Hypothesis], expected: list[Hypothesis]) -> None:
    assert [hypothesis.tokens for hypothesis in found] == [hypothesis.tokens for hypothesis in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.score == pytest.approx(theirs.score, rel=0, abs=1e-12)


settings_of_a_search = {
    "seed": st.integers(0, 10_000),
    "sharpness": st.sampled_from([0.3, 1.0, 4.0]),
    "penalty": st.sampled_from([0.0, 0.6, 1.0, 2.0]),
}


@pytest.mark.slow
@given(**settings_of_a_search)
def test_a_beam_that_holds_everything_finds_everything(seed, sharpness, penalty):
    """Three tokens can follow: 40 sequences of up to three tokens, of which at most 36 are candidates at a time."""
    model = decoder(seed, vocabulary=5, sharpness=sharpness)
    source = sources(5, 2, 3)
    found = beam_search(model, source, beam=40, length_penalty=penalty, max_length=(0.5, 1.5))
    for row, hypotheses in zip(source, found, strict=True):
        assert_same(hypotheses, exhaustive(model, row, (0.5, 1.5), penalty))


@given(**settings_of_a_search, beam=st.integers(1, 5), towards_the_end=st.sampled_from([-2.0, 0.0, 2.0]))
def test_a_narrow_beam_matches_fairseq(seed, sharpness, penalty, beam, towards_the_end):
    model = decoder(seed, 7, sharpness, towards_the_end)
    source = sources(7, 3, 1, 4)
    found = beam_search(model, source, beam=beam, length_penalty=penalty, max_length=(1.2, 3))
    for row, hypotheses in zip(source, found, strict=True):
        assert_same(hypotheses, step_by_step(model, row, beam, (1.2, 3), penalty))


def test_the_examples_cover_both_ways_to_finish():
    """The tests above would show little if every sentence, or none, reached its maximum length."""
    model = decoder(1, 7, towards_the_end=2.0)
    (eager,) = beam_search(model, sources(7, 4), beam=3, max_length=(0, 20))
    assert len(eager) == 3
    assert max(len(hypothesis.tokens) for hypothesis in eager) < 20
    model = decoder(1, 7, towards_the_end=-20.0)
    (reluctant,) = beam_search(model, sources(7, 4), beam=3, max_length=(0, 20))
    assert [len(hypothesis.tokens) for hypothesis in reluctant] == [20, 20, 20]


@given(seed=st.integers(0, 10_000), lengths=st.lists(st.integers(0, 6), min_size=2, max_size=4))
def test_a_batch_gives_the_same_as_its_sentences_one_by_one(seed, lengths):
    model = decoder(seed, 9, sharpness=2.0, towards_the_end=1.0)
    source = sources(9, *lengths, 6)
    together = beam_search(model, source, beam=3)
    for length, row, hypotheses in zip([*lengths, 6], source, together, strict=True):
        if length == 0:
            assert hypotheses == []  # a row of padding only
            continue
        (alone,) = beam_search(model, row[:length].unsqueeze(0), beam=3)
        assert_same(hypotheses, alone)


def test_the_score_is_the_log_probability_over_the_length():
    model, (source,) = decoder(3, 9), sources(9, 4)
    for hypothesis in beam_search(model, source.unsqueeze(0), length_penalty=0.6)[0]:
        sequence = [*hypothesis.tokens, EOS]
        logp = sum(
            float(log_probabilities(model, source, tuple(sequence[:at]))[token]) for at, token in enumerate(sequence)
        )
        assert hypothesis.score == pytest.approx(logp / len(sequence) ** 0.6, abs=1e-12)


def test_a_hypothesis_never_exceeds_the_positions():
    model = decoder(0, 7, towards_the_end=-20.0)
    ((hypothesis,),) = beam_search(model, sources(7, 4), beam=1, max_length=(10, 10))
    assert len(hypothesis.tokens) == 31  # plus the end token, which needs no position


def test_nan_logits_give_no_hypotheses():
    model = decoder(0, 7)
    with torch.no_grad():
        model.head.weight[3] = torch.nan
    assert beam_search(model, sources(7, 4, 2)) == [[], []]


class HostReads(TorchDispatchMode):
    """Counts operations that make the host wait for the device."""

    waiting = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique", "repeat_interleave")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.count += function.name().removeprefix("aten::").split(".")[0] in self.waiting
        return function(*arguments, **(options or {}))


def test_the_host_rarely_waits_for_the_device():
    model = decoder(0, 7, towards_the_end=-20.0)
    with HostReads() as reads:
        bool(torch.ones(1).all())
    assert reads.count == 1
    with HostReads() as reads:
        beam_search(model, sources(7, 4, 2), max_length=(0, 21))
    assert reads.count == 22 // CHECK_EVERY


def test_bfloat16_weights_are_searched_in_single_precision():
    model = decoder(0, 7).bfloat16()
    (hypotheses,) = beam_search(model, sources(7, 4), beam=2)
    assert len(hypotheses) == 2
    assert any(hypothesis.score != float(torch.tensor(hypothesis.score).bfloat16()) for hypothesis in hypotheses)


def test_a_model_in_training_mode_is_refused():
    with pytest.raises(ValueError, match="model must be in eval mode"):
        beam_search(decoder(0, 7).train(), sources(7, 3))

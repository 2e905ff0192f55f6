"""Text for language modelling: nothing of the file is lost, and windows cover it."""

import io
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llqr.lab.errors import ConfigurationError
from llqr.lab.text import parallel_text, token_stream
from llqr.lab.text.subwords import PAD
from llqr.lab.text.token_stream import StreamSettings, prepare_stream
from llqr.lab.text.windows import WindowBatches
from parallel_text import sentences

SMALL = StreamSettings(merges=50, held_out=0.1)
LINES = [f"  {line}\t≤ 日本" if i % 7 else "" for i, line in enumerate(sentences("de", 200))]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("\n".join(LINES) + "\n")
    return path


def test_decoding_reproduces_the_file(file, tmp_path):
    made, new = prepare_stream(file, SMALL, tmp_path / "out")
    assert new
    text = token_stream.load(tmp_path / "out")
    splits = {name: text.decode(getattr(text, name).tolist()) for name in ("train", "valid", "test")}
    assert "".join(splits.values()) == file.read_text()
    assert splits["valid"] == "".join(line + "\n" for line in LINES[160:180])
    for name, split in splits.items():
        expected = {"bytes": len(split.encode()), "tokens": len(getattr(text, name)), "kept": split.count("\n")}
        assert text.counts[name] | expected == text.counts[name]
    assert text.encode(LINES[1] + "\n") == text.train[1 : 1 + len(text.encode(LINES[1] + "\n"))].tolist()
    assert text.vocabulary.tokens == 4 + 256 + 50
    assert text.key == made.name


def test_lines_that_are_not_utf8_are_counted(file, tmp_path):
    file.write_bytes(b"\xff\xfe\n" * 3 + file.read_bytes() + b"\xe4\n")
    text = token_stream.load(prepare_stream(file, SMALL, tmp_path / "out")[0])
    assert [text.counts[name]["bad_utf8"] for name in ("train", "valid", "test")] == [3, 0, 1]
    assert all(counts["read"] == counts["kept"] + counts["bad_utf8"] for counts in text.counts.values())


def test_a_stream_is_cached_and_not_mistaken_for_pairs(file, tmp_path):
    first = prepare_stream(file, SMALL, tmp_path / "one")[0]
    second = prepare_stream(file, SMALL, tmp_path / "two")[0]
    assert {path.name: path.read_bytes() for path in first.iterdir()} == {
        path.name: path.read_bytes() for path in second.iterdir()
    }
    assert prepare_stream(file, SMALL, tmp_path / "one") == (first, False)
    assert prepare_stream(file, StreamSettings(merges=40, held_out=0.1), tmp_path / "one")[1]
    with pytest.raises(ValueError, match="was prepared as a stream of text, but parallel text was expected"):
        parallel_text.load(first)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"merges": -1}, "merges must not be negative, got -1"),
        ({"held_out": 0.5}, "held_out must lie between 0 and 0.5, got 0.5"),
    ],
)
def test_bad_settings_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        StreamSettings(**arguments)


def test_a_text_of_too_few_lines_is_refused(tmp_path):
    (tmp_path / "short").write_text("one\ntwo\n")
    with pytest.raises(ValueError, match=r"held_out must be at least one line, got 0\.1 of 2 lines"):
        prepare_stream(tmp_path / "short", SMALL, tmp_path / "out")


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

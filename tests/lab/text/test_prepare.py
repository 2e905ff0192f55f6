"""Preparing parallel text: the recipe step by step, counts, reproducible bytes, the cache, and interruption."""

import json
import os
import random
import sys

import pytest
import sacremoses
from hypothesis import given
from hypothesis import strategies as st

from llqr.lab.errors import Stopped
from llqr.lab.stop import Stop
from llqr.lab.text import cleaning, corpus, parallel_text, prepare, prepared_folder
from llqr.lab.text.cleaning import REASONS, Rules, process
from llqr.lab.text.prepare import ParallelTextSettings
from llqr.lab.text.stages import Stages
from llqr.lab.text.subwords import UNK
from parallel_text import sentences, write_folder

SMALL = {"merges": 60}


def prepare_folder(source, root, *, processes=1, stages=None, **settings):
    raw = corpus.from_folder(source)
    chosen = ParallelTextSettings(raw.languages, **(SMALL | settings))
    return prepare.prepare(raw, chosen, root, processes=processes, stages=stages)


def contents(place):
    return {path.name: path.read_bytes() for path in place.iterdir()}


@pytest.fixture
def source(tmp_path):
    return write_folder(tmp_path / "raw")


def test_tokens_are_the_words_of_the_text(source, tmp_path):
    made, new = prepare_folder(source, tmp_path / "out")
    assert new
    text = parallel_text.load(made)
    assert text.languages == ("de", "en")
    for name, pairs, seed in (("train", text.train, 0), ("valid", text.valid, 1), ("test", text.test, 2)):
        for language, side in (("de", pairs.source), ("en", pairs.target)):
            written = sentences(language, len(pairs), seed)
            tokeniser = sacremoses.MosesTokenizer(language)
            expected = [tokeniser.tokenize(line, return_str=True).lower() for line in written]
            assert [text.subwords.decode(side[i]) for i in range(len(side))] == expected
        assert list(pairs.references) == ([] if name == "train" else sentences("en", len(pairs), seed))


def test_detokenised_text_is_the_text_in_lower_case(source, tmp_path):
    text = parallel_text.load(prepare_folder(source, tmp_path)[0])
    detokenised = [text.detokenise(text.valid.target[i]) for i in range(len(text.valid))]
    assert detokenised == [reference.lower() for reference in text.valid.references]
    assert any("isn't" in line for line in detokenised)


def test_a_sentence_is_encoded_as_the_corpus_was(source, tmp_path):
    text = parallel_text.load(prepare_folder(source, tmp_path)[0])
    encoded = text.encode([*sentences("de", 20, 1), "", "№"])
    assert [encoded[i] for i in range(20)] == [text.valid.source[i] for i in range(20)]
    assert encoded[20] == []
    assert encoded[21] == [UNK]


def test_case_is_kept_on_request(source, tmp_path):
    text = parallel_text.load(prepare_folder(source, tmp_path, lowercase=False)[0])
    assert text.detokenise(text.test.target[0]) == text.test.references[0]
    assert text.settings["lowercase"] is False


def test_a_dropped_pair_is_counted_once(tmp_path):
    good = ("Das ist gut.", "That is good.")
    lines = {
        "bad_utf8": [(b"Gr\xf6\xdfe", b"size"), (b"", b"\xff")],
        "empty": [(b"", b"x"), (b" \t\r", b"x"), (b"\x01\x02", b"x"), (b"", b""), ("\u00a0".encode(), b"x")],
        "too_long": [(b"a " * 13, b"b " * 13)],
        "ratio": [(b"a b c d", b"a b"), (b"a", b"b c")],
        "too_short": [],
        "long_word": [(b"a" * 1001, b"a")],
    }
    assert set(lines) == set(REASONS)
    pairs = [pair for some in lines.values() for pair in some] + [tuple(side.encode() for side in good)] * 100
    random.Random(0).shuffle(pairs)
    for number, language in enumerate(("de", "en")):
        content = b"".join(pair[number] + b"\n" for pair in pairs)
        for split in ("train", "valid", "test"):
            (tmp_path / f"{split}.{language}").write_bytes(content)
    text = parallel_text.load(prepare_folder(tmp_path, tmp_path / "out", longest=12)[0])
    dropped = {reason: len(some) for reason, some in lines.items()}
    for name, pairs_kept in (("train", text.train), ("valid", text.valid)):
        counts = text.counts[name]
        # The limits on lengths and ratio apply to training text only.
        expected = dropped if name == "train" else {"bad_utf8": 2, "empty": 5}
        assert {reason: counts[reason] for reason in REASONS} == dict.fromkeys(REASONS, 0) | expected
        assert counts["kept"] == len(pairs_kept) == counts["read"] - sum(expected.values())
        assert counts["target_tokens"] == len(pairs_kept.target.tokens)
    assert len(text.valid.references) == len(text.valid)


word_lists = st.lists(st.sampled_from(["ja", "nein", "x" * 1001]), max_size=9)


@given(source=word_lists, target=word_lists, shortest=st.integers(1, 3), ratio=st.sampled_from([1.0, 1.5, 3.0]))
def test_training_pairs_follow_the_rules_of_moses(source, target, shortest, ratio):
    rules = Rules(("de", "en"), shortest=shortest, longest=6, ratio=ratio)
    lengths = len(source), len(target)
    kept = (
        all(shortest <= length <= 6 for length in lengths)
        and lengths[0] <= ratio * lengths[1]
        and lengths[1] <= ratio * lengths[0]
        and all(len(word) <= 1000 for word in (*source, *target))
    )
    lines = " ".join(source).encode(), " ".join(target).encode()
    (outcome,) = process([lines], rules, training=True)
    assert (outcome == (" ".join(source), " ".join(target))) == kept
    assert kept or outcome in REASONS


def test_every_23rd_kept_pair_is_for_validation(tmp_path):
    """As ``awk 'NR % 23 == 0'`` does after cleaning."""
    source = write_folder(tmp_path / "raw", train=200, valid=0, test=10)
    for language in ("de", "en"):
        path = source / f"train.{language}"
        path.write_text("\n" * 3 + path.read_text())
    text = parallel_text.load(prepare_folder(source, tmp_path / "out")[0])
    lines = sentences("en", 200)
    assert list(text.valid.references) == lines[22::23]
    assert text.detokenise(text.train.target[22]) == lines[23].lower()
    assert text.counts["train"] | {"read": 203, "empty": 3, "held_out": 8, "kept": 192} == text.counts["train"]
    assert text.counts["valid"]["read"] == len(text.valid) == 8
    assert len(text.test) == 10


def test_without_any_other_files_test_pairs_are_held_out_too(tmp_path):
    source = write_folder(tmp_path / "raw", train=100, valid=0, test=0)
    text = parallel_text.load(prepare_folder(source, tmp_path / "out", valid_every=10)[0])
    lines = sentences("en", 100)
    assert list(text.valid.references) == lines[9::10]
    assert list(text.test.references) == lines[4::10]
    kept = [line.lower() for i, line in enumerate(lines) if i % 10 not in (4, 9)]
    assert [text.detokenise(text.train.target[i]) for i in range(len(text.train))] == kept


def test_too_few_pairs_to_hold_any_out_are_refused(tmp_path):
    source = write_folder(tmp_path / "raw", train=20, valid=0, test=5)
    with pytest.raises(ValueError, match="valid must have pairs that are kept, got none"):
        prepare_folder(source, tmp_path / "out")


def test_the_bytes_do_not_depend_on_time_place_or_processes(source, tmp_path, monkeypatch):
    first, _ = prepare_folder(source, tmp_path / "one")
    monkeypatch.setattr(prepare, "PAIRS_FOR_PROCESSES", 1)
    monkeypatch.setattr(prepare, "PAIRS_IN_A_PIECE", 37)
    moved = source.rename(tmp_path / "elsewhere")
    second, new = prepare_folder(moved, tmp_path / "two", processes=2)
    assert new
    assert contents(first) == contents(second)
    assert first.name == second.name


def test_prepared_text_is_not_prepared_again(source, tmp_path, monkeypatch):
    made, new = prepare_folder(source, tmp_path / "out")
    assert new
    monkeypatch.setattr(prepare, "_make", lambda *_: pytest.fail("prepared again"))
    assert prepare_folder(source, tmp_path / "out") == (made, False)


def test_other_settings_or_another_text_get_their_own_folder(source, tmp_path):
    root = tmp_path / "out"
    first, _ = prepare_folder(source, root)
    second, new = prepare_folder(source, root, merges=50)
    assert new
    path = source / "valid.en"
    path.write_text(path.read_text().replace("dog", "cat", 1))
    third, new = prepare_folder(source, root, merges=50)
    assert new
    assert len({first, second, third}) == 3
    assert parallel_text.load(root).key == third.name
    write_folder(source)  # as before; the name of the corpus means what was requested last
    assert prepare_folder(source, root) == (first, False)
    assert parallel_text.load(root).key == first.name
    assert parallel_text.load(second).key == second.name


@pytest.mark.parametrize("stage", ["words", "subwords", "tokens", "writing"])
def test_an_interrupted_preparation_leaves_nothing_behind(source, tmp_path, monkeypatch, stage):
    root = tmp_path / "out"

    class Interrupted(Stages):
        def stage(self, label, total, unit):
            if label == stage:
                raise KeyboardInterrupt
            return super().stage(label, total, unit)

    if stage == "writing":
        written = []

        def fail(descriptor):
            written.append(descriptor)
            if len(written) == 5:
                raise KeyboardInterrupt

        monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(KeyboardInterrupt):
        prepare_folder(source, root, stages=Interrupted())
    assert not root.exists() or not list(root.iterdir())
    with pytest.raises(FileNotFoundError, match="out holds no prepared text; prepare it with: llqr data out"):
        parallel_text.load(root)
    monkeypatch.undo()
    assert prepare_folder(source, root)[1]


def test_a_half_written_folder_is_not_taken_for_a_prepared_one(source, tmp_path):
    """As after a power failure, when nothing could be cleaned up."""
    root = tmp_path / "out"
    made, _ = prepare_folder(source, tmp_path / "other")
    root.mkdir()
    partial = made.rename(root / (prepared_folder.PARTIAL + "x"))
    (partial / prepared_folder.MANIFEST).unlink()
    with pytest.raises(FileNotFoundError, match="holds no prepared text"):
        parallel_text.load(root)
    assert prepare_folder(source, root)[1]
    assert len(parallel_text.load(root).train) == 300


def test_a_stop_request_ends_the_preparation(source, tmp_path):
    stop = Stop()
    stop.reason = "SIGTERM"
    with pytest.raises(Stopped, match="Stopped by SIGTERM before the text was prepared"):
        prepare_folder(source, tmp_path / "out", stages=Stages(stop=stop))
    assert not (tmp_path / "out").exists()


def test_two_preparations_at_once_agree(source, tmp_path):
    """The slower one finds that the folder exists already."""
    made, _ = prepare_folder(source, tmp_path)
    files = contents(made)
    assert prepared_folder.write(tmp_path, made.name, {"kind": "another"}, {"train.en.tokens": b"another"}) == made
    assert contents(made) == files
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(prepared_folder.PARTIAL)] == []
    assert len(parallel_text.load(made).train) == 300


def test_damaged_files_are_detected(source, tmp_path):
    made, _ = prepare_folder(source, tmp_path)
    path = made / "train.en.tokens"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"train\.en\.tokens is damaged"):
        parallel_text.load(tmp_path)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"train\.en\.tokens is missing"):
        parallel_text.load(tmp_path)
    (made / prepared_folder.MANIFEST).write_text("{")
    with pytest.raises(ValueError, match=r"prepared\.json is damaged"):
        parallel_text.load(tmp_path)


def test_another_format_is_refused(source, tmp_path):
    made, _ = prepare_folder(source, tmp_path)
    path = made / prepared_folder.MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": prepared_folder.FORMAT + 1}))
    written = prepared_folder.FORMAT + 1
    with pytest.raises(ValueError, match=f"has format {written}, this version reads {prepared_folder.FORMAT}"):
        parallel_text.load(tmp_path)


def test_without_sacremoses_everything_but_words_works(source, tmp_path, monkeypatch):
    prepare_folder(source, tmp_path)
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    cleaning._moses.cache_clear()
    text = parallel_text.load(tmp_path)
    assert text.subwords.decode(text.valid.target[0])
    for use in (lambda: text.detokenise(text.valid.target[0]), lambda: text.encode(["Hallo."])):
        with pytest.raises(ModuleNotFoundError, match=r"sacremoses, which is not installed; .*llqr\[lab\]"):
            use()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"merges": -1}, "merges must not be negative, got -1"),
        ({"valid_every": 2}, "valid_every must be at least 3, got 2"),
        ({"ratio": 0.5}, "ratio must be at least 1, got 0.5"),
        ({"shortest": 0}, "shortest must be at least 1, got 0"),
        ({"longest": 0}, "longest must be at least shortest, 1, got 0"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        ParallelTextSettings(("de", "en"), **settings)

"""Preparing text: fairseq's recipe step by step, counts, keys, and files that are complete or absent."""

import random

import pytest
import sacremoses
import torch
from hypothesis import given
from hypothesis import strategies as st

from llqr.lab.text import corpus, prepared
from llqr.lab.text.prepared import PairSettings, ParallelText, clean, prepare_pairs
from parallel_text import sentences, write_folder

PAIR = ("de", "en")


def prepare_folder(source, root, **settings):
    """Whether it was prepared now, and the text."""
    new = prepare_pairs(corpus.read(source, PAIR), PairSettings(PAIR, **({"merges": 60} | settings)), root)
    return new, ParallelText.load(root)


@pytest.fixture
def source(tmp_path):
    return write_folder(tmp_path / "raw")


def test_tokens_are_the_words_of_the_text(source, tmp_path):
    new, text = prepare_folder(source, tmp_path / "out")
    assert new
    assert text.settings["languages"] == PAIR
    for name, pairs, seed in (("train", text.train, 0), ("valid", text.valid, 1), ("test", text.test, 2)):
        for language, side in (("de", pairs.source), ("en", pairs.target)):
            written = sentences(language, len(pairs), seed)
            tokeniser = sacremoses.MosesTokenizer(language)
            expected = [tokeniser.tokenize(line, return_str=True).lower() for line in written]
            assert [text.subwords.decode(tokens.tolist()) for tokens in side] == expected
        assert list(pairs.references) == ([] if name == "train" else sentences("en", len(pairs), seed))


def test_detokenised_text_is_the_text_in_lower_case(source, tmp_path):
    _, text = prepare_folder(source, tmp_path / "out")
    detokenised = [text.detokenise(tokens) for tokens in text.valid.target]
    assert detokenised == [reference.lower() for reference in text.valid.references]
    assert any("isn't" in line for line in detokenised)
    _, text = prepare_folder(source, tmp_path / "out", lowercase=False)
    assert text.detokenise(text.test.target[0]) == text.test.references[0]


def test_pairs_are_dropped_by_mosess_rules_and_counted(tmp_path):
    whatever = [
        *[(b"Gr\xf6\xdfe", b"size"), (b"", b"\xff")],  # not UTF-8
        *[(b"", b"x"), (b" \t\r", b"x"), (b"\x01\x02", b"x"), (b"", b""), ("\u00a0".encode(), b"x")],  # empty
    ]
    training = [(b"a " * 13, b"b " * 13), (b"a b c d", b"a b"), (b"a", b"b c"), (b"a" * 1001, b"a")]
    pairs = whatever + training + [(b"Das ist gut.", b"That is good.")] * 100
    random.Random(0).shuffle(pairs)
    for number, language in enumerate(PAIR):
        content = b"".join(pair[number] + b"\n" for pair in pairs)
        for split in ("train", "valid", "test"):
            (tmp_path / f"{split}.{language}").write_bytes(content)
    _, text = prepare_folder(tmp_path, tmp_path / "out", longest=12)
    assert (len(text.train), len(text.valid), len(text.test)) == (100, 104, 104)
    assert len(text.valid.references) == 104
    assert prepared.read(tmp_path / "out")["counts"] == {
        "train": {"read": 111, "kept": 100},
        "valid": {"read": 111, "kept": 104},
        "test": {"read": 111, "kept": 104},
    }


word_lists = st.lists(st.sampled_from(["ja", "nein", "x" * 1001]), max_size=9)


@given(source=word_lists, target=word_lists, shortest=st.integers(1, 3), ratio=st.sampled_from([1.0, 1.5, 3.0]))
def test_training_pairs_follow_the_rules_of_moses(source, target, shortest, ratio):
    settings = PairSettings(PAIR, shortest=shortest, longest=6, ratio=ratio)
    lengths = len(source), len(target)
    kept = (
        all(shortest <= length <= 6 for length in lengths)
        and lengths[0] <= ratio * lengths[1]
        and lengths[1] <= ratio * lengths[0]
        and all(len(word) <= 1000 for word in (*source, *target))
    )
    words = " ".join(source), " ".join(target)
    outcome = clean(words[0].encode(), words[1].encode(), settings, training=True)
    assert outcome == ((*words, words[1]) if kept else None)


def test_every_23rd_kept_pair_is_for_validation(tmp_path):
    """As ``awk 'NR % 23 == 0'`` does after cleaning."""
    source = write_folder(tmp_path / "raw", train=200, valid=0, test=10)
    for language in PAIR:
        path = source / f"train.{language}"
        path.write_text("\n" * 3 + path.read_text())
    _, text = prepare_folder(source, tmp_path / "out")
    lines = sentences("en", 200)
    assert list(text.valid.references) == lines[22::23]
    assert text.detokenise(text.train.target[22]) == lines[23].lower()
    assert (len(text.train), len(text.valid), len(text.test)) == (192, 8, 10)


def test_without_other_files_test_pairs_are_held_out_too(tmp_path):
    source = write_folder(tmp_path / "raw", train=100, valid=0, test=0)
    _, text = prepare_folder(source, tmp_path / "out", valid_every=10)
    lines = sentences("en", 100)
    assert list(text.valid.references) == lines[9::10]
    assert list(text.test.references) == lines[4::10]
    kept = [line.lower() for i, line in enumerate(lines) if i % 10 not in (4, 9)]
    assert [text.detokenise(tokens) for tokens in text.train.target] == kept
    source = write_folder(tmp_path / "few", train=20, valid=0, test=5)
    with pytest.raises(ValueError, match="valid must have pairs that are kept, got none"):
        prepare_folder(source, tmp_path / "out")


def test_the_key_depends_on_text_and_settings_only(source, tmp_path, monkeypatch):
    root = tmp_path / "out"
    new, first = prepare_folder(source, root)
    assert new
    new, second = prepare_folder(source, root, merges=50)
    assert new
    path = source / "valid.en"
    path.write_text(path.read_text().replace("dog", "cat", 1))
    new, third = prepare_folder(source, root)
    assert new
    assert len({first.key, second.key, third.key}) == 3
    write_folder(source)
    assert prepare_folder(source, root)[1].key == first.key
    moved = source.rename(tmp_path / "elsewhere")
    monkeypatch.setattr(prepared, "_prepare", lambda *_: pytest.fail("prepared again"))
    assert not prepare_folder(moved, root)[0]


def test_the_key_of_the_kept_runs(tmp_path, monkeypatch):
    """``results/iwslt14.jsonl`` names the prepared Europarl by its key; a changed key would make the runs others."""
    digests = {
        "060e878fa20fb5065d6edcef95291381ec6d2a5a26cc548bd78f4107ffd2530e": 160_000,
        "9ff2f5cef2f0b7f974abdfec331f500b20955d032b3927e11249bd432692e775": 160_000,
        "a8d15b132dc5255dd77c1338b9ba1ff4c06a106323c1ff9ace216eb0795e83ab": 4000,
        "d09ce2af9192c31f6324850f2c08beea6c87777848a030629a1cbc9f8460a8c0": 4000,
        "3fdfcfa565341379fc852a57dab84590e82176422cead147f78954653c3ae6c2": 4000,
        "bf31b018bd908fe8b703a02a23816728c717957959606fc8fa8ed3cd35734af4": 4000,
    }
    described = ({"lines": lines, "sha256": digest} for digest, lines in digests.items())
    monkeypatch.setattr(prepared, "_described", lambda lines: next(described))
    monkeypatch.setattr(prepared, "version", {"sacremoses": "0.2.0", "tokenizers": "0.23.3"}.__getitem__)
    monkeypatch.setattr(prepared, "_prepare", lambda *_: {})
    prepare_pairs({name: ([], []) for name in corpus.SPLITS}, PairSettings(PAIR), tmp_path / "europarl")
    assert prepared.read(tmp_path / "europarl")["key"] == "63e52100c9ea72ef"


def test_an_interrupted_preparation_leaves_nothing_behind(source, tmp_path, monkeypatch):
    root = tmp_path / "out"
    for name in ("torch.save", "llqr.lab.text.subwords.learn"):
        with monkeypatch.context() as patch:
            patch.setattr(name, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                prepare_folder(source, root)
        assert {path.name for path in tmp_path.iterdir()} == {"raw"}
        with pytest.raises(FileNotFoundError, match=r"no prepared text .*out.pt; prepare it with: llqr data out"):
            ParallelText.load(root)
    assert prepare_folder(source, root)[0]


def test_a_damaged_file_is_named(source, tmp_path):
    _, text = prepare_folder(source, tmp_path / "out")
    path = tmp_path / "out.pt"
    content = bytearray(path.read_bytes())
    content[content.index(torch.cat(text.train.source).numpy().tobytes()) + 100] ^= 1
    for damaged in (content, content[:1000]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"out.pt is damaged: .*remove it and prepare the text again"):
            ParallelText.load(tmp_path / "out")

"""The byte-pair encoding: against a plain loop, the same in every process, lossless."""

import json
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from string import ascii_lowercase

from hypothesis import given, settings
from hypothesis import strategies as st

from llqr.lab.text.subwords import END_OF_WORD, EOS, PAD, SPECIAL, UNK, Subwords, learn
from parallel_text import sentences

words = st.text(st.characters(codec="utf-8", exclude_categories=("Z", "C"), exclude_characters="<>"), min_size=1)


def merged(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    """``word`` with every occurrence of ``pair`` merged, from the left."""
    made: list[str] = []
    rest = list(word)
    while rest:
        if tuple(rest[:2]) == pair:
            made.append(rest.pop(0) + rest.pop(0))
        else:
            made.append(rest.pop(0))
    return tuple(made)


def count_pairs(words: Counter[tuple[str, ...]]) -> Counter[tuple[str, str]]:
    counts: Counter[tuple[str, str]] = Counter()
    for word, times in words.items():
        for pair in pairwise(word):
            counts[pair] += times
    return counts


@given(st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=40))
@settings(max_examples=60)
def test_every_merge_joins_the_most_frequent_pair(made):
    learned = learn([" ".join(made)], 12)
    merges = [tuple(pair) for pair in json.loads(learned.write())["model"]["merges"]]
    words = Counter((*word[:-1], word[-1] + END_OF_WORD) for word in made)
    for pair in merges:
        counts = count_pairs(words)
        assert counts[pair] == max(counts.values()) >= 2
        joined: Counter[tuple[str, ...]] = Counter()
        for word, times in words.items():
            joined[merged(word, pair)] += times
        words = joined
    left = count_pairs(words)
    assert len(merges) <= 12
    assert len(merges) == 12 or not left or max(left.values()) < 2
    assert len(learned.encode([" ".join(made)])[0]) == sum(len(word) * times for word, times in words.items())


def test_there_are_as_many_merges_as_requested():
    text = sentences("de", 200) + sentences("en", 200)
    few, more = (learn(text, count) for count in (20, 60))
    assert more.tokens - few.tokens == 40
    characters = {character for line in text for character in line if character != " "}
    last = {word[-1] for line in text for word in line.split()}
    assert few.tokens == len(SPECIAL) + len(characters) + len(last) + 20


def test_a_rare_pair_is_not_merged():
    learned = learn(["abc"], 100)
    assert len(learned.encode(["abc"])[0]) == 3


def test_every_process_learns_the_same_subwords():
    """All pairs are equally frequent here, so that only the order of the alphabet decides."""
    text = [" ".join(a + b for a in ascii_lowercase for b in ascii_lowercase)] * 2
    script = f"import sys; from llqr.lab.text.subwords import learn;sys.stdout.write(learn({text!r}, 50).write())"
    path = {"PYTHONPATH": ":".join(sys.path)}
    elsewhere = subprocess.run([sys.executable, "-c", script], env=path, capture_output=True, text=True, check=True)
    assert learn(text, 50).write() == elsewhere.stdout


@given(st.lists(words, min_size=1, max_size=8))
@settings(max_examples=50)
def test_known_words_decode_to_themselves(made):
    text = [" ".join(made)]
    learned = learn(text, 10)
    tokens = learned.encode(text)[0]
    assert UNK not in tokens
    assert learned.decode(tokens).split() == made
    assert learned.decode([*tokens, EOS, PAD, *tokens]) == learned.decode(tokens)


def test_text_cannot_produce_special_tokens():
    text = [" ".join(SPECIAL) + " <pad> <s> </s>"] * 5
    assert not {0, 1, 2, 3} & set(learn(text, 200).encode(text)[0])


def test_an_unknown_character_decodes_as_unknown():
    learned = learn(["ab ab"], 1)
    tokens = learned.encode(["ab z ab"])[0]
    assert tokens.count(UNK) == 1
    assert learned.decode(tokens) == "ab <unk> ab"


def test_numbers_beyond_the_tokens_decode_to_nothing():
    learned = learn(["abc abc"], 1)
    assert learned.size % 8 == 0
    assert learned.size > learned.tokens
    assert learned.decode([learned.size - 1]) == ""


def test_subwords_survive_writing_and_reading():
    learned = learn(sentences("de", 50), 20)
    again = Subwords.read(learned.write())
    assert again.write() == learned.write()
    assert (again.tokens, again.size) == (learned.tokens, learned.size)
    assert again.encode(sentences("de", 5)) == learned.encode(sentences("de", 5))

"""Prepare text: parallel text as in fairseq's recipe for IWSLT14, or any text file for language modelling.

A dropped pair is counted once, under the first reason that applies. Length and ratio limits are those of Moses'
``clean-corpus-n.perl`` and apply to training text only, as they do there.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llqr.lab.text import prepared, subwords
from llqr.lab.text.corpus import SPLITS, Corpus, read_lines
from llqr.lab.text.prepared import ParallelText, TokenStream, moses
from llqr.lab.text.subwords import EOS, UNK

REASONS = {
    "bad_utf8": "not UTF-8",
    "empty": "a side is empty",
    "too_short": "too few words",
    "too_long": "too many words",
    "ratio": "lengths too different",
    "long_word": "a word too long",
}
"""Why a pair is dropped: the key in the counts, and the text in tables."""
LONGEST_WORD = 1000  # characters, as in clean-corpus-n.perl

Pair = tuple[str, str, str]
"""The words of both sides, separated by spaces, and the target as it was written."""


@dataclass(frozen=True)
class PairSettings:
    """Everything besides the text itself that determines the tokens of parallel text.

    Attributes:
        languages: of the source and of the target.
        lowercase: whether to lowercase the words.
        shortest, longest: numbers of words that a side of a training pair may have.
        ratio: maximum ratio of the number of words of the longer side to that of the shorter.
        merges: number of merges of the byte-pair encoding, learned on the training text.
        valid_every: without validation files, one in this many of the kept training pairs is used for validation.
    """

    languages: tuple[str, str]
    lowercase: bool = True
    shortest: int = 1
    longest: int = 175
    ratio: float = 1.5
    merges: int = 10_000
    valid_every: int = 23


@dataclass(frozen=True)
class StreamSettings:
    """Everything besides the text itself that determines the tokens of one text file.

    Attributes:
        merges: number of merges of the byte-pair encoding, learned on the training text.
        held_out: the fraction of the lines used for validation, and again for the test, from the end of the file.
    """

    merges: int = 10_000
    held_out: float = 0.02


def prepare_pairs(corpus: Corpus, settings: PairSettings, root: Path) -> bool:
    """Prepare ``corpus`` as the text ``root`` unless it is there; whether it was prepared now."""
    facts = {
        "kind": ParallelText.KIND,
        "settings": asdict(settings),
        "versions": {name: version(name) for name in ("sacremoses", "tokenizers")},  # others may give other tokens
        "inputs": {
            name: {one: _described(side) for one, side in zip(settings.languages, sides, strict=True)}
            for name, sides in corpus.items()
        },
    }
    return prepared.make(root, facts, lambda: _prepare_pairs(corpus, settings))


def _prepare_pairs(corpus: Corpus, settings: PairSettings) -> dict[str, Any]:
    splits, counts = _cleaned(corpus, settings)
    missing = [name for name in SPLITS if name not in splits]
    splits |= hold_out(splits["train"], missing, settings.valid_every)
    counts["train"] |= {"held_out": sum(len(splits[name]) for name in missing), "kept": len(splits["train"])}
    counts |= {name: _counts(len(splits[name]), {}, len(splits[name])) for name in missing}
    for name, pairs in splits.items():
        if not pairs:
            raise ValueError(f"{name} must have pairs that are kept, got none: {counts[name]}.")
    learned = subwords.learn([words for pair in splits["train"] for words in pair[:2]], settings.merges, "words")
    saved = {}
    for name in SPLITS:
        source, target = (_joined(learned.encode([pair[side] for pair in splits[name]])) for side in range(2))
        saved[name] = {
            "source": source,
            "target": target,
            "references": [] if name == "train" else [written for _, _, written in splits[name]],
        }
        counts[name] |= {
            "source_tokens": len(source[0]) - len(splits[name]),  # without end tokens
            "target_tokens": len(target[0]) - len(splits[name]),
            "unknown_tokens": int((source[0] == UNK).sum() + (target[0] == UNK).sum()),
        }
    return _content(learned, {name: counts[name] for name in SPLITS}, saved)


def _cleaned(corpus: Corpus, settings: PairSettings) -> tuple[dict[str, list[Pair]], dict[str, dict[str, int]]]:
    """The kept pairs of every split, and how many pairs were dropped for each reason."""
    splits, counts = {}, {}
    for name, sides in corpus.items():
        outcomes = [clean(*pair, settings, training=name == "train") for pair in zip(*sides, strict=True)]
        splits[name] = [outcome for outcome in outcomes if not isinstance(outcome, str)]
        dropped = Counter(outcome for outcome in outcomes if isinstance(outcome, str))
        counts[name] = _counts(len(outcomes), dropped, len(splits[name]))
    return splits, counts


def clean(source: bytes, target: bytes, settings: PairSettings, training: bool) -> str | Pair:
    """The words of a pair of lines, or one of `REASONS` to drop it."""
    try:
        texts = [line.decode().strip() for line in (source, target)]
    except UnicodeDecodeError:
        return "bad_utf8"
    sides = []
    for text, language in zip(texts, settings.languages, strict=True):
        tokenised = str(moses("MosesTokenizer", language).tokenize(text, return_str=True))
        sides.append((tokenised.lower() if settings.lowercase else tokenised).split())
    short, long = sorted(map(len, sides))
    if short == 0:
        return "empty"
    if training:
        if short < settings.shortest:
            return "too_short"
        if long > settings.longest:
            return "too_long"
        if long / short > settings.ratio:
            return "ratio"
        if any(len(word) > LONGEST_WORD for word in chain(*sides)):
            return "long_word"
    return " ".join(sides[0]), " ".join(sides[1]), texts[1]


def hold_out(train: list[Pair], names: Sequence[str], every: int) -> dict[str, list[Pair]]:
    """The splits ``names``, taken from the training pairs, and the training pairs that remain.

    Of ``every`` so many kept pairs the last goes to validation, as in fairseq's recipe for IWSLT14, and one in the
    middle to the test split.
    """
    places = {name: every - 1 if name == "valid" else every // 2 - 1 for name in names}
    held = {name: train[place::every] for name, place in places.items()}
    return held | {"train": [pair for row, pair in enumerate(train) if row % every not in places.values()]}


def prepare_stream(path: Path, settings: StreamSettings, root: Path) -> bool:
    """Prepare the file at ``path`` as the text ``root`` unless it is there; whether it was prepared now."""
    lines = read_lines(path)
    facts = {
        "kind": TokenStream.KIND,
        "settings": asdict(settings),
        "versions": {"tokenizers": version("tokenizers")},  # another one may give other tokens
        "inputs": {"text": _described(lines)},
    }
    return prepared.make(root, facts, lambda: _prepare_stream(lines, settings))


def _prepare_stream(lines: list[bytes], settings: StreamSettings) -> dict[str, Any]:
    held = int(len(lines) * settings.held_out)
    if held < 1:
        raise ValueError(f"held_out must be at least one line, got {settings.held_out} of {len(lines)} lines.")
    parts = {"train": lines[: -2 * held], "valid": lines[-2 * held : -held], "test": lines[-held:]}
    kept = {
        name: [f"{text}\n" for line in part if (text := _decoded(line)) is not None] for name, part in parts.items()
    }
    learned = subwords.learn(kept["train"], settings.merges, "bytes")
    saved, counts = {}, {}
    for name, texts in kept.items():
        saved[name] = torch.tensor(list(chain.from_iterable(learned.encode(texts))), dtype=torch.int32)
        counts[name] = {
            "read": len(parts[name]),
            "bad_utf8": len(parts[name]) - len(texts),
            "kept": len(texts),
            "bytes": sum(len(text.encode()) for text in texts),
            "tokens": len(saved[name]),
        }
    return _content(learned, counts, saved)


def _content(learned: subwords.Subwords, counts: dict[str, Any], splits: dict[str, Any]) -> dict[str, Any]:
    vocabulary = {"size": learned.size, "tokens": learned.tokens}
    return {"vocabulary": vocabulary, "counts": counts, "subwords": learned.write(), "splits": splits}


def _described(lines: list[bytes]) -> dict[str, Any]:
    """The number of lines and their digest, the same whether the file is compressed or not."""
    return {"lines": len(lines), "sha256": hashlib.sha256(b"\n".join(lines)).hexdigest()}


def _counts(read: int, dropped: dict[str, int], kept: int) -> dict[str, int]:
    return {"read": read, **dict.fromkeys(REASONS, 0), **dropped, "held_out": 0, "kept": kept}


def _joined(sentences: list[list[int]]) -> tuple[Tensor, Tensor]:
    """All tokens one after the other, each sentence with an end token, and the lengths of the sentences."""
    tokens = torch.tensor(list(chain.from_iterable([*one, EOS] for one in sentences)), dtype=torch.int32)
    return tokens, torch.tensor([len(one) + 1 for one in sentences])


def _decoded(line: bytes) -> str | None:
    try:
        return line.decode()
    except UnicodeDecodeError:
        return None

"""Prepared text, one file each: complete or absent, and the same key always means the same tokens.

The key is a digest of everything that could change a token. Preparation follows fairseq's recipe for IWSLT14; limits of
lengths and ratios are those of Moses' ``clean-corpus-n.perl`` and apply to training text only, as they do there.

>>> from llqr.lab.text.prepared import ParallelText
>>> text = ParallelText.load("data/iwslt14")
>>> text.subwords.size, len(text.train), text.detokenise(text.valid.target[0])
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from llqr.lab.text import subwords
from llqr.lab.text.corpus import SPLITS, Corpus
from llqr.lab.text.subwords import EOS, Subwords
from llqr.lab.writing import check_archive, make_folder, replacing

NAME = re.compile(r"\w[\w.-]*")
"""Valid names of a prepared text."""
FORMAT = 1
"""Incremented whenever the same input gives different tokens."""
LONGEST_WORD = 1000  # characters, as in clean-corpus-n.perl

Pair = tuple[str, str, str]
"""The words of both sides, separated by spaces, and the target as it was written."""


def file_of(root: Path) -> Path:
    """Where the text ``root`` is kept: ``data/iwslt14`` in ``data/iwslt14.pt``."""
    return root.with_name(f"{root.name}.pt")


def read(root: Path, *, mmap: bool = False) -> dict[str, Any]:
    """The content of the file of ``root``; with ``mmap`` its tokens stay on the disk."""
    path = file_of(root)
    if not path.is_file():
        raise FileNotFoundError(
            f"There is no prepared text {path.absolute()}; prepare it with: llqr data {root.name} --data-dir "
            f"{root.parent} --source FOLDER"
        )
    try:
        check_archive(path)
        content: dict[str, Any] = torch.load(path, weights_only=True, mmap=mmap)
    except Exception as error:  # torch's zip reader and unpickler raise many kinds
        raise ValueError(f"{path} is damaged: {error}; remove it and prepare the text again.") from error
    return content


@dataclass(frozen=True)
class SentencePairs:
    """Parallel sentences: what to translate, and the translations.

    Attributes:
        source, target: the tokens of every sentence, int32, with the end token.
        references: for validation and test the translations before tokenisation and lowercasing, which BLEU is measured
            against; none for training.
    """

    source: Sequence[Tensor]
    target: Sequence[Tensor]
    references: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.source)

    @property
    def lengths(self) -> Tensor:
        """The numbers of tokens (pairs, 2) of both sides."""
        return torch.tensor([[len(sentence) for sentence in side] for side in (self.source, self.target)]).T


@dataclass(frozen=True)
class ParallelText:
    """A parallel corpus as tokens; its languages share the vocabulary.

    With ``settings["lowercase"]`` the target is lower case and the references are not, so that BLEU must be measured
    case-insensitively.

    Attributes:
        train, valid, test: for training, for choosing a model, and for measuring it.
        subwords: the encoding.
        settings: how the text was prepared.
        key: a digest of everything that could change a token.
    """

    train: SentencePairs
    valid: SentencePairs
    test: SentencePairs
    subwords: Subwords
    settings: Mapping[str, Any]
    key: str

    @classmethod
    def load(cls, root: Path | str) -> Self:
        """Load what `llqr data` prepared: ``data/iwslt14`` is the text iwslt14 in the folder data."""
        saved = read(Path(root))
        splits = {}
        for name, split in saved["splits"].items():
            source, target = (tokens.split(lengths.tolist()) for tokens, lengths in (split["source"], split["target"]))
            splits[name] = SentencePairs(source, target, split["references"])
        subwords = Subwords.read(saved["subwords"])
        return cls(**splits, subwords=subwords, settings=saved["settings"], key=saved["key"])

    def detokenise(self, tokens: Tensor | Sequence[int]) -> str:
        """Target ``tokens`` as plain text, to be compared with a reference; needs sacremoses."""
        numbers = tokens.tolist() if isinstance(tokens, Tensor) else tokens
        _, language = self.settings["languages"]
        return str(moses("MosesDetokenizer", language).detokenize(self.subwords.decode(numbers).split()))


@lru_cache
def moses(tool: str, language: str) -> Any:
    """A tokeniser or detokeniser by Moses' rules."""
    import sacremoses

    return getattr(sacremoses, tool)(lang=language)


# -- preparation -------------------------------------------------------------------------------------------------------


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


def prepare_pairs(corpus: Corpus, settings: PairSettings, root: Path) -> bool:
    """Prepare ``corpus`` as the text ``root`` unless it is there; whether it was prepared now."""
    facts = {
        "format": FORMAT,
        "kind": "parallel text",
        "settings": asdict(settings),
        "versions": {name: version(name) for name in ("sacremoses", "tokenizers")},  # others may give other tokens
        "inputs": {
            name: {one: _described(side) for one, side in zip(settings.languages, sides, strict=True)}
            for name, sides in corpus.items()
        },
    }
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    with suppress(OSError, ValueError):
        if read(root, mmap=True)["key"] == key:
            return False
    content = {"key": key, **facts, **_prepare(corpus, settings)}
    make_folder(root.parent)
    with replacing(file_of(root)) as file:
        torch.save(content, file)
    return True


def _prepare(corpus: Corpus, settings: PairSettings) -> dict[str, Any]:
    splits = {}
    for name, sides in corpus.items():
        cleaned = (clean(*pair, settings, training=name == "train") for pair in zip(*sides, strict=True))
        splits[name] = [pair for pair in cleaned if pair is not None]
    splits |= hold_out(splits["train"], [name for name in SPLITS if name not in splits], settings.valid_every)
    for name, pairs in splits.items():
        if not pairs:
            raise ValueError(f"{name} must have pairs that are kept, got none.")
    amounts = {name: len(sides[0]) for name, sides in corpus.items()}
    learned = subwords.learn([words for pair in splits["train"] for words in pair[:2]], settings.merges)
    saved = {}
    for name in SPLITS:
        source, target = (_joined(learned.encode([pair[side] for pair in splits[name]])) for side in range(2))
        references = [] if name == "train" else [written for _, _, written in splits[name]]
        saved[name] = {"source": source, "target": target, "references": references}
    return {
        "vocabulary": {"size": learned.size, "tokens": learned.tokens},
        "counts": {name: {"read": amounts.get(name, 0), "kept": len(splits[name])} for name in SPLITS},
        "subwords": learned.write(),
        "splits": saved,
    }


def clean(source: bytes, target: bytes, settings: PairSettings, training: bool) -> Pair | None:
    """The words of a pair of lines, or None where the pair is dropped."""
    try:
        texts = [line.decode().strip() for line in (source, target)]
    except UnicodeDecodeError:
        return None
    sides = []
    for text, language in zip(texts, settings.languages, strict=True):
        tokenised = str(moses("MosesTokenizer", language).tokenize(text, return_str=True))
        sides.append((tokenised.lower() if settings.lowercase else tokenised).split())
    short, long = sorted(map(len, sides))
    if short == 0:
        return None
    if training and not (
        settings.shortest <= short
        and long <= settings.longest
        and long / short <= settings.ratio
        and all(len(word) <= LONGEST_WORD for word in chain(*sides))
    ):
        return None
    return " ".join(sides[0]), " ".join(sides[1]), texts[1]


def hold_out(train: list[Pair], names: Sequence[str], every: int) -> dict[str, list[Pair]]:
    """The splits ``names``, taken from the training pairs, and the training pairs that remain.

    Of ``every`` so many kept pairs the last goes to validation, as in fairseq's recipe for IWSLT14, and one in the
    middle to the test split.
    """
    places = {name: every - 1 if name == "valid" else every // 2 - 1 for name in names}
    held = {name: train[place::every] for name, place in places.items()}
    return held | {"train": [pair for row, pair in enumerate(train) if row % every not in places.values()]}


def _described(lines: list[bytes]) -> dict[str, Any]:
    """The number of lines and their digest, the same whether the file is compressed or not."""
    return {"lines": len(lines), "sha256": hashlib.sha256(b"\n".join(lines)).hexdigest()}


def _joined(sentences: list[list[int]]) -> tuple[Tensor, Tensor]:
    """All tokens one after the other, each sentence with an end token, and the lengths of the sentences."""
    tokens = torch.tensor(list(chain.from_iterable([*one, EOS] for one in sentences)), dtype=torch.int32)
    return tokens, torch.tensor([len(one) + 1 for one in sentences])

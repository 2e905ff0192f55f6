"""Prepared text, one file each: complete or absent, and the same key always means the same tokens.

The key is a digest of everything that could change a token.

>>> from llqr.lab.text.prepared import ParallelText
>>> text = ParallelText.load("data/iwslt14")
>>> text.subwords.size, len(text.train), text.detokenise(text.valid.target[0])
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar
from zipfile import ZipFile

import torch
from torch import Tensor

from llqr.lab.extras import extra
from llqr.lab.text.corpus import SPLITS
from llqr.lab.text.subwords import Subwords
from llqr.lab.writing import make_folder, replacing

FORMAT = 1
"""Incremented whenever the same input gives different tokens."""
NAME = re.compile(r"\w[\w.-]*")
"""Valid names of a prepared text."""
Split = TypeVar("Split")


def file_of(root: Path) -> Path:
    """Where the text ``root`` is kept: ``data/iwslt14`` in ``data/iwslt14.pt``."""
    return root.with_name(f"{root.name}.pt")


def make(root: Path, facts: Mapping[str, Any], prepare: Callable[[], Mapping[str, Any]]) -> bool:
    """Prepare a text and keep it, unless it is kept with the same ``facts``; whether it was prepared now."""
    key = hashlib.sha256(json.dumps({"format": FORMAT, **facts}, sort_keys=True).encode()).hexdigest()[:16]
    with suppress(OSError, ValueError):
        if read(root, mmap=True)["key"] == key:
            return False
    content = {"key": key, **facts, **prepare()}
    make_folder(root.parent)
    with replacing(file_of(root)) as file:
        torch.save(content, file)
    return True


def read(root: Path, *, mmap: bool = False) -> dict[str, Any]:
    """The content of the file of ``root``; with ``mmap`` its tokens are not read."""
    path = file_of(root)
    if not path.is_file():
        raise FileNotFoundError(
            f"There is no prepared text {path.absolute()}; prepare it with: llqr data {root.name} --data-dir "
            f"{root.parent}, and --source FOLDER for translation or --text FILE for language modelling."
        )
    try:
        content: dict[str, Any] = torch.load(path, weights_only=True, mmap=mmap)
        if not mmap and (damaged := ZipFile(path).testzip()):  # torch does not compare the checksums
            raise ValueError(f"the checksum of {damaged} is wrong")
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


@dataclass(frozen=True, kw_only=True)
class PreparedText(Generic[Split]):
    """A text as tokens.

    Attributes:
        train, valid, test: for training, for choosing a model, and for measuring it.
        subwords: the encoding.
        settings: how the text was prepared.
        counts: for each split what was read, dropped for each reason, and kept.
        key: a digest of everything that could change a token.
    """

    KIND: ClassVar[str]
    train: Split
    valid: Split
    test: Split
    subwords: Subwords
    settings: Mapping[str, Any]
    counts: Mapping[str, Mapping[str, int]]
    key: str

    @classmethod
    def load(cls, root: Path | str) -> Self:
        """Load what `llqr data` prepared: ``data/iwslt14`` is the text iwslt14 in the folder data."""
        saved = read(Path(root))
        if saved["kind"] != cls.KIND:
            raise ValueError(f"{root} was prepared as {saved['kind']}, but {cls.KIND} was expected.")
        return cls(
            **{name: cls._split(saved["splits"][name]) for name in SPLITS},
            **{name: saved[name] for name in ("settings", "counts", "key")},
            subwords=Subwords.read(saved["subwords"]),
        )

    @classmethod
    def _split(cls, saved: Any) -> Any:
        return saved


class TokenStream(PreparedText[Tensor]):
    """Any text file as one long sequence of tokens, int32; decoding them reproduces the file."""

    KIND = "a stream of text"


class ParallelText(PreparedText[SentencePairs]):
    """A parallel corpus whose languages share the vocabulary.

    With ``settings["lowercase"]`` the target is lower case and the references are not, so that BLEU must be measured
    case-insensitively.
    """

    KIND = "parallel text"

    @property
    def languages(self) -> tuple[str, str]:
        """Of the source and of the target."""
        source, target = self.settings["languages"]
        return source, target

    def detokenise(self, tokens: Tensor | Sequence[int]) -> str:
        """Target ``tokens`` as plain text, to be compared with a reference; needs sacremoses."""
        numbers = tokens.tolist() if isinstance(tokens, Tensor) else tokens
        return str(moses("MosesDetokenizer", self.languages[1]).detokenize(self.subwords.decode(numbers).split()))

    @classmethod
    def _split(cls, saved: Mapping[str, Any]) -> SentencePairs:
        source, target = (tokens.split(lengths.tolist()) for tokens, lengths in (saved["source"], saved["target"]))
        return SentencePairs(source, target, saved["references"])


@lru_cache
def moses(tool: str, language: str) -> Any:
    """A tokeniser or detokeniser by Moses' rules."""
    return getattr(extra("sacremoses", "Tokenisation needs sacremoses"), tool)(lang=language)

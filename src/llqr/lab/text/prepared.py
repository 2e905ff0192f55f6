"""Prepared text, one file each: complete or absent, and the same key always means the same tokens.

The key is a digest of everything that could change a token.

>>> from llqr.lab.text.prepared import ParallelText
>>> text = ParallelText.load("data/iwslt14")
>>> text.subwords.size, len(text.train), text.detokenise(text.valid.target[0])
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self
from zipfile import ZipFile

import torch
from torch import Tensor

from llqr.lab.extras import extra
from llqr.lab.text.corpus import SPLITS
from llqr.lab.text.subwords import Subwords

NAME = re.compile(r"\w[\w.-]*")
"""Valid names of a prepared text."""


def file_of(root: Path) -> Path:
    """Where the text ``root`` is kept: ``data/iwslt14`` in ``data/iwslt14.pt``."""
    return root.with_name(f"{root.name}.pt")


def read(root: Path, *, mmap: bool = False) -> dict[str, Any]:
    """The content of the file of ``root``; with ``mmap`` its tokens are not read."""
    path = file_of(root)
    if not path.is_file():
        raise FileNotFoundError(
            f"There is no prepared text {path.absolute()}; prepare it with: llqr data {root.name} --data-dir "
            f"{root.parent} --source FOLDER"
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
        splits = []
        for split in (saved["splits"][name] for name in SPLITS):
            source, target = (tokens.split(lengths.tolist()) for tokens, lengths in (split["source"], split["target"]))
            splits.append(SentencePairs(source, target, split["references"]))
        return cls(*splits, Subwords.read(saved["subwords"]), saved["settings"], saved["key"])

    @property
    def languages(self) -> tuple[str, str]:
        """Of the source and of the target."""
        source, target = self.settings["languages"]
        return source, target

    def detokenise(self, tokens: Tensor | Sequence[int]) -> str:
        """Target ``tokens`` as plain text, to be compared with a reference; needs sacremoses."""
        numbers = tokens.tolist() if isinstance(tokens, Tensor) else tokens
        return str(moses("MosesDetokenizer", self.languages[1]).detokenize(self.subwords.decode(numbers).split()))


@lru_cache
def moses(tool: str, language: str) -> Any:
    """A tokeniser or detokeniser by Moses' rules."""
    return getattr(extra("sacremoses", "Tokenisation needs sacremoses"), tool)(lang=language)

"""How sentences are tokenised, by Moses' rules with sacremoses, and which pairs are kept.

A dropped pair is counted once, under the first reason that applies. Length and ratio limits are those of Moses'
``clean-corpus-n.perl`` and apply to training text only, as they do there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from llqr.lab.extras import extra
from llqr.lab.text.lines import decode

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


@dataclass(frozen=True)
class Rules:
    """How sentences are tokenised and which training pairs are kept.

    Attributes:
        languages: of the source and of the target.
        lowercase: whether words are lowercased.
        shortest: minimum number of words per side.
        longest: maximum number of words per side.
        ratio: maximum ratio of the number of words of the longer side to that of the shorter.
    """

    languages: tuple[str, str]
    lowercase: bool = True
    shortest: int = 1
    longest: int = 175
    ratio: float = 1.5

    def __post_init__(self) -> None:
        if self.shortest < 1:
            raise ValueError(f"shortest must be at least 1, got {self.shortest}.")
        if self.longest < self.shortest:
            raise ValueError(f"longest must be at least shortest, {self.shortest}, got {self.longest}.")
        if self.ratio < 1:
            raise ValueError(f"ratio must be at least 1, got {self.ratio}.")

    def words(self, text: str, language: str) -> list[str]:
        """The words of a sentence."""
        tokenised = tokenise(text, language)
        return (tokenised.lower() if self.lowercase else tokenised).split()

    def reason_to_drop(self, source: Sequence[str], target: Sequence[str]) -> str | None:
        """Why a training pair with these words is not kept."""
        short, long = sorted((len(source), len(target)))
        if short < self.shortest:
            return "too_short"
        if long > self.longest:
            return "too_long"
        if long / short > self.ratio:
            return "ratio"
        return "long_word" if any(len(word) > LONGEST_WORD for word in (*source, *target)) else None


Outcome = str | tuple[str, str]
"""One of `REASONS`, or the words of both sides."""


def process(pairs: Sequence[tuple[bytes, bytes]], rules: Rules, training: bool) -> list[Outcome]:
    """The outcome for every pair of lines; runs in a worker process."""
    return [_outcome(source, target, rules, training) for source, target in pairs]


def _outcome(source: bytes, target: bytes, rules: Rules, training: bool) -> Outcome:
    texts = [text for text in (decode(source), decode(target)) if text is not None]
    if len(texts) < 2:
        return "bad_utf8"
    sides = [rules.words(text.strip(), language) for text, language in zip(texts, rules.languages, strict=True)]
    if not all(sides):
        return "empty"
    reason = rules.reason_to_drop(*sides) if training else None
    return reason or (" ".join(sides[0]), " ".join(sides[1]))


def tokenise(text: str, language: str) -> str:
    """The words of ``text`` separated by spaces; what Moses treats as markup is escaped, as its script does."""
    return str(_moses("MosesTokenizer", language).tokenize(text, return_str=True))


def detokenise(words: Sequence[str], language: str) -> str:
    """The plain text of escaped ``words``."""
    return str(_moses("MosesDetokenizer", language).detokenize(list(words)))


@lru_cache
def _moses(tool: str, language: str) -> Any:
    return getattr(extra("sacremoses", "Tokenisation needs sacremoses"), tool)(lang=language)

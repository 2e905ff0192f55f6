"""Which pairs of sentences are kept, and the count of those that are not; each is counted once, for the first reason.

Lengths and ratio are those of Moses' ``clean-corpus-n.perl``, and like there only training text is held to them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from llqr.lab.text import moses
from llqr.lab.text.lines import decode

REASONS = {
    "bad_utf8": "not UTF-8",
    "empty": "a side is empty",
    "too_short": "too few words",
    "too_long": "too many words",
    "ratio": "lengths too different",
    "long_word": "a word too long",
}
"""Why a pair is dropped, and how to say it."""
LONGEST_WORD = 1000  # characters, as in clean-corpus-n.perl


@dataclass(frozen=True)
class Rules:
    """How sentences are cut into words and which training pairs are kept.

    Attributes:
        languages: of the source and of the target.
        lowercase: whether words are written in small letters.
        shortest: the fewest words of a side.
        longest: the most words of a side.
        ratio: the most words of one side for a word of the other.
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
        tokenised = moses.tokenise(text, language)
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
"""A reason out of `REASONS`, or the words of both sides."""


def process(pairs: Sequence[tuple[bytes, bytes]], rules: Rules, training: bool) -> list[Outcome]:
    """What becomes of every pair of lines; a job for a process of its own."""
    return [_outcome(source, target, rules, training) for source, target in pairs]


def _outcome(source: bytes, target: bytes, rules: Rules, training: bool) -> Outcome:
    texts = [text for text in (decode(source), decode(target)) if text is not None]
    if len(texts) < 2:
        return "bad_utf8"
    sides = [rules.words(text, language) for text, language in zip(texts, rules.languages, strict=True)]
    if not all(sides):
        return "empty"
    reason = rules.reason_to_drop(*sides) if training else None
    return reason or (" ".join(sides[0]), " ".join(sides[1]))

"""What parallel text and token streams have in common once they are prepared."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llqr.lab.text.subwords import Subwords
from llqr.lab.text.vocabulary import Vocabulary

SUBWORDS = "subwords.json"
"""The file of a prepared folder that holds its encoding."""


@dataclass(frozen=True, kw_only=True)
class PreparedText:
    """The encoding of a prepared text, and how it was made.

    Attributes:
        subwords: the encoding.
        settings: how the text was prepared.
        counts: for each split what was read, dropped for each reason, and kept.
        key: a digest of everything that could change a token.
    """

    subwords: Subwords
    settings: Mapping[str, Any]
    counts: Mapping[str, Mapping[str, int]]
    key: str

    @property
    def vocabulary(self) -> Vocabulary:
        return self.subwords.vocabulary

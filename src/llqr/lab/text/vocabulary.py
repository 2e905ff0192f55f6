"""The special tokens, and the size of the vocabulary."""

from dataclasses import dataclass

PAD, BOS, EOS, UNK = range(4)
SPECIAL = ("<the padding>", "<sentence begins>", "<sentence ends>", "<unknown token>")
"""Names of the special tokens. No token of a text contains a space, so none can be mistaken for one of these."""


@dataclass(frozen=True)
class Vocabulary:
    """The numbers of the tokens, shared by both languages.

    Attributes:
        size: rows of the embedding: a multiple of 8, for the matrix units of a GPU; the last few have no token.
        tokens: number of tokens.
    """

    size: int
    tokens: int


def vocabulary(tokens: int, multiple: int = 8) -> Vocabulary:
    """The vocabulary of ``tokens`` tokens, including the special ones."""
    return Vocabulary(-(-tokens // multiple) * multiple, tokens)

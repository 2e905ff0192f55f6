"""The numbers of tokens that mean something to a model, and how many there are."""

from dataclasses import dataclass

PAD, BOS, EOS, UNK = range(4)
SPECIAL = ("<the padding>", "<sentence begins>", "<sentence ends>", "<unknown token>")
"""What the special tokens are called. No token of a text contains a space, so none is taken for one of these."""


@dataclass(frozen=True)
class Vocabulary:
    """One vocabulary for both languages.

    Attributes:
        size: rows that an embedding needs. A multiple of 8, for the matrix units of a GPU; the last few have no token.
        tokens: how many of them are tokens.
    """

    size: int
    tokens: int
    pad: int = PAD
    bos: int = BOS
    eos: int = EOS
    unk: int = UNK


def vocabulary(tokens: int, multiple: int = 8) -> Vocabulary:
    """The vocabulary of so many ``tokens``, the special ones among them."""
    return Vocabulary(-(-tokens // multiple) * multiple, tokens)

"""Byte-pair encoding with `tokenizers`: learning, encoding and decoding; the same text always gives the same tokens.

Symbols are the characters of space-separated words, the last character of a word marked, as in subword-nmt.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import tokenizers

PAD, BOS, EOS, UNK = range(4)
SPECIAL = ("<the padding>", "<sentence begins>", "<sentence ends>", "<unknown token>")
"""Names of the special tokens. No token of a text contains a space, so none can be mistaken for one of these."""
END_OF_WORD = "</w>"
MIN_FREQUENCY = 2  # of a pair that is merged, as in subword-nmt
TEXTS_AT_ONCE = 10_000


class Subwords:
    """A learned encoding, a `tokenizers.Tokenizer`; `write` and `read` convert it to and from JSON.

    Attributes:
        tokens: number of tokens, including the special ones.
        size: rows of the embedding: a multiple of 8, for the matrix units of a GPU; the last few have no token.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # An unknown token also ends its word, because the rest of the word is unknown too.
        self._unknown = "<unk>" + END_OF_WORD
        self.tokens: int = tokenizer.get_vocab_size()
        self.size = -(-self.tokens // 8) * 8

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of every text."""
        found: list[list[int]] = []
        for first in range(0, len(texts), TEXTS_AT_ONCE):
            part = list(texts[first : first + TEXTS_AT_ONCE])
            found += [encoding.ids for encoding in self._tokenizer.encode_batch(part, add_special_tokens=False)]
        return found

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of ``tokens``, up to the end-of-sentence token if there is one."""
        pieces = []
        for token in tokens:
            if token == EOS:
                break
            if token not in (PAD, BOS):
                piece = self._unknown if token == UNK else self._tokenizer.id_to_token(token)
                pieces.append(piece or "")  # numbers beyond the tokens decode to nothing
        return str(self._tokenizer.decoder.decode(pieces))

    def write(self) -> str:
        return str(self._tokenizer.to_str())

    @classmethod
    def read(cls, written: str) -> "Subwords":
        return cls(tokenizers.Tokenizer.from_str(written))


def learn(texts: Sequence[str], merges: int) -> Subwords:
    """The encoding that merges the most frequent pair of neighbours, ``merges`` times or until no pair occurs twice."""
    words = {word for text in texts for word in text.split()}
    last = sorted({word[-1] + END_OF_WORD for word in words})
    symbols = [*sorted({character for word in words for character in word}), *last]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=len(symbols) + merges,
        min_frequency=MIN_FREQUENCY,
        show_progress=False,
        # The library numbers marked characters in an order that changes from process to process, and so do the ties
        # between pairs. Passed as special tokens, they keep this order.
        special_tokens=last,
        end_of_word_suffix=END_OF_WORD,
    )
    tokenizer = _build({}, [])
    tokenizer.train_from_iterator(texts, trainer)
    joined = [(a, b) for a, b in json.loads(tokenizer.to_str())["model"]["merges"]]
    tokens = dict.fromkeys([*SPECIAL, *symbols, *(a + b for a, b in joined)])
    # The library is not told that these names are special tokens: otherwise it would look for them in a text.
    return Subwords(_build({token: number for number, token in enumerate(tokens)}, joined))


def _build(numbers: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    unknown = SPECIAL[UNK] if numbers else None
    model = tokenizers.models.BPE(numbers, merges, unk_token=unknown, end_of_word_suffix=END_OF_WORD)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = tokenizers.decoders.BPEDecoder(suffix=END_OF_WORD)
    return tokenizer

"""Byte-pair encoding with `tokenizers`: learning, encoding and decoding; the same text always gives the same tokens.

There are two alphabets. ``"words"``: the characters of space-separated words, the last character of a word marked, as
in subword-nmt. ``"bytes"``: the bytes of any text, spaces included, so that every text can be encoded without loss.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from llqr.lab.extras import extra

PAD, BOS, EOS, UNK = range(4)
MULTIPLE = 8
SPECIAL = ("<the padding>", "<sentence begins>", "<sentence ends>", "<unknown token>")
"""Names of the special tokens. No token of a text contains a space, so none can be mistaken for one of these."""
END_OF_WORD = "</w>"
MIN_FREQUENCY = 2  # of a pair that is merged, as in subword-nmt
UNKNOWN_WORD = "<unk>"
TEXTS_AT_ONCE = 10_000


@dataclass(frozen=True)
class Vocabulary:
    """The numbers of the tokens, shared by both languages.

    Attributes:
        size: rows of the embedding: a multiple of 8, for the matrix units of a GPU; the last few have no token.
        tokens: number of tokens, including the special ones.
    """

    size: int
    tokens: int


class Subwords:
    """A learned encoding, a `tokenizers.Tokenizer`; `write` and `read` convert it to and from JSON."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # An unknown token also ends its word, because the rest of the word is unknown too.
        self._unknown = UNKNOWN_WORD + END_OF_WORD if tokenizer.model.unk_token else ""
        tokens: int = tokenizer.get_vocab_size()
        self.vocabulary = Vocabulary(-(-tokens // MULTIPLE) * MULTIPLE, tokens)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of every text."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def encode_in_parts(self, texts: Sequence[str], advance: Callable[[int], None]) -> Iterator[list[list[int]]]:
        """`encode` in chunks; ``advance`` is called with the size of each chunk."""
        for first in range(0, len(texts), TEXTS_AT_ONCE):
            part = self.encode(texts[first : first + TEXTS_AT_ONCE])
            advance(len(part))
            yield part

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
        try:
            return cls(_tokenizers().Tokenizer.from_str(written))
        except ModuleNotFoundError:
            raise
        except Exception as error:  # the library raises nothing more specific
            raise ValueError(f"The subwords cannot be read: {error}.") from error


def learn(texts: Callable[[], Iterable[str]], merges: int, alphabet: Literal["words", "bytes"]) -> Subwords:
    """The encoding that merges the most frequent pair of neighbours, ``merges`` times or until no pair occurs twice.

    ``texts`` returns all texts, and is called more than once.
    """
    found, joined = (_learn_words if alphabet == "words" else _learn_bytes)(texts, merges)
    tokens = dict.fromkeys([*SPECIAL, *found, *(a + b for a, b in joined)])
    # The library is not told that these names are special tokens: otherwise it would look for them in a text.
    return Subwords(_build({token: number for number, token in enumerate(tokens)}, joined, alphabet))


def _learn_words(texts: Callable[[], Iterable[str]], merges: int) -> tuple[list[str], list[tuple[str, str]]]:
    """The alphabet and the merges of ``"words"``."""
    inner: set[str] = set()
    last: set[str] = set()
    for text in texts():
        for word in text.split():
            inner.update(word)
            last.add(word[-1] + END_OF_WORD)
    marked = sorted(last)
    # The library numbers marked characters in an order that changes from process to process, and so do the ties between
    # pairs. Passed as special tokens, they keep this order.
    joined = _train("words", texts, len(inner), merges, special_tokens=marked, end_of_word_suffix=END_OF_WORD)
    return [*sorted(inner), *marked], joined


def _learn_bytes(texts: Callable[[], Iterable[str]], merges: int) -> tuple[list[str], list[tuple[str, str]]]:
    alphabet = sorted(_tokenizers().pre_tokenizers.ByteLevel.alphabet())
    return alphabet, _train("bytes", texts, len(alphabet), merges, initial_alphabet=alphabet)


def _train(
    alphabet: str, texts: Callable[[], Iterable[str]], characters: int, merges: int, **options: Any
) -> list[tuple[str, str]]:
    tokenizer = _build({}, [], alphabet)
    size = len(options.get("special_tokens", ())) + characters + merges
    trainer = _tokenizers().trainers.BpeTrainer(
        vocab_size=size, min_frequency=MIN_FREQUENCY, show_progress=False, **options
    )
    tokenizer.train_from_iterator(texts(), trainer)
    return [(a, b) for a, b in json.loads(tokenizer.to_str())["model"]["merges"]]


def _build(numbers: dict[str, int], merges: list[tuple[str, str]], alphabet: str) -> Any:
    library = _tokenizers()
    if alphabet == "words":
        unknown = SPECIAL[UNK] if numbers else None
        model = library.models.BPE(numbers, merges, unk_token=unknown, end_of_word_suffix=END_OF_WORD)
        tokenizer = library.Tokenizer(model)
        tokenizer.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
        tokenizer.decoder = library.decoders.BPEDecoder(suffix=END_OF_WORD)
    else:
        tokenizer = library.Tokenizer(library.models.BPE(numbers, merges))
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.decoder = library.decoders.ByteLevel()
    return tokenizer


def _tokenizers() -> Any:
    return extra("tokenizers", "Subwords need tokenizers")

"""Prepared parallel text, as a model is trained and measured on it.

>>> from llqr.lab.text import prepared
>>> text = prepared.load("data/iwslt14")
>>> text.vocabulary.size, len(text.train), text.detokenise(text.valid.target[0])
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llqr.lab.text import folder, moses
from llqr.lab.text.cleaning import Rules
from llqr.lab.text.corpus import SPLITS
from llqr.lab.text.sentences import Pairs, Sentences
from llqr.lab.text.subwords import Subwords
from llqr.lab.text.vocabulary import Vocabulary

__all__ = ["KIND", "Pairs", "Prepared", "Sentences", "Vocabulary", "load"]

KIND = "parallel text"
SUBWORDS = "subwords.json"


@dataclass(frozen=True)
class Prepared:
    """A prepared corpus.

    Attributes:
        train: pairs to learn from.
        valid: pairs to choose a model by, with references.
        test: pairs to measure it on, with references.
        languages: of the source and of the target.
        settings: how it was prepared. With ``settings["lowercase"]`` the target is in small letters and the references
            are not: BLEU is to be measured without regard to case.
        counts: for each split what was read, what was dropped for which reason, and what was kept.
        key: changes with everything that could change a token.
    """

    train: Pairs
    valid: Pairs
    test: Pairs
    subwords: Subwords
    languages: tuple[str, str]
    settings: Mapping[str, Any]
    counts: Mapping[str, Mapping[str, int]]
    key: str

    @property
    def vocabulary(self) -> Vocabulary:
        """Its size and special tokens; both languages share it."""
        return self.subwords.vocabulary

    def encode(self, sentences: Sequence[str]) -> Sentences:
        """The tokens of sentences in the source language as somebody writes them; an empty one has none."""
        rules = Rules(self.languages, lowercase=self.settings["lowercase"])
        words = [" ".join(rules.words(sentence, self.languages[0])) for sentence in sentences]
        return Sentences.of(self.subwords.encode(words))

    def words(self, tokens: Iterable[int]) -> str:
        """The words of target ``tokens``, with spaces between them, as Moses' tokeniser leaves them."""
        return self.subwords.decode(tokens)

    def detokenise(self, tokens: Iterable[int]) -> str:
        """The text of target ``tokens``, as it is compared with a reference; needs sacremoses."""
        return moses.detokenise(self.words(tokens).split(), self.languages[1])


def load(root: Path | str) -> Prepared:
    """Read what `llqr data` prepared at ``root``: the folder of a name, or one of the preparations in it."""
    place, manifest, files = folder.read(Path(root), KIND)
    try:
        subwords = Subwords.read(files[SUBWORDS].decode())
        splits = {name: _read_split(name, files, subwords.vocabulary.tokens, manifest) for name in SPLITS}
        return Prepared(
            **splits,
            subwords=subwords,
            languages=tuple(manifest["settings"]["languages"]),
            settings=manifest["settings"],
            counts=manifest["counts"],
            key=manifest["key"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{place} is damaged: {error}; remove it and prepare the text again.") from error


def _read_split(name: str, files: Mapping[str, bytes], tokens: int, manifest: Mapping[str, Any]) -> Pairs:
    source, target = (
        folder.unpack_sentences(files, f"{name}.{one}", tokens) for one in manifest["settings"]["languages"]
    )
    written = files.get(f"{name}.references")
    references = [] if written is None else written.decode().split("\n")[:-1]
    return Pairs(source, target, references)

"""Prepared parallel text, ready for training and evaluation.

>>> from llqr.lab.text import parallel_text
>>> text = parallel_text.load("data/iwslt14")
>>> text.vocabulary.size, len(text.train), text.detokenise(text.valid.target[0])
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llqr.lab.text import prepared_folder
from llqr.lab.text.cleaning import Rules, detokenise
from llqr.lab.text.prepared_folder import PreparedText
from llqr.lab.text.sentences import SentencePairs, Sentences


@dataclass(frozen=True, kw_only=True)
class ParallelText(PreparedText):
    """A prepared parallel corpus.

    Attributes:
        train: training pairs.
        valid: pairs for choosing a model, with references.
        test: pairs for measuring it, with references.

    With ``settings["lowercase"]`` the target is lower case and the references are not, so that BLEU must be measured
    case-insensitively. Both languages share the vocabulary.
    """

    KIND = "parallel text"
    train: SentencePairs
    valid: SentencePairs
    test: SentencePairs

    @property
    def languages(self) -> tuple[str, str]:
        """Of the source and of the target."""
        source, target = self.settings["languages"]
        return source, target

    def encode(self, sentences: Sequence[str]) -> Sentences:
        """The tokens of raw sentences in the source language; an empty sentence has none."""
        rules = Rules(self.languages, lowercase=self.settings["lowercase"])
        words = [" ".join(rules.words(sentence, self.languages[0])) for sentence in sentences]
        return Sentences.of(self.subwords.encode(words))

    def detokenise(self, tokens: Iterable[int]) -> str:
        """Target ``tokens`` as plain text, to be compared with a reference; needs sacremoses."""
        return detokenise(self.subwords.decode(tokens).split(), self.languages[1])

    @classmethod
    def _split(cls, name: str, files: Mapping[str, bytes], tokens: int, settings: Mapping[str, Any]) -> SentencePairs:
        source, target = (
            prepared_folder.unpack_sentences(files, f"{name}.{one}", tokens) for one in settings["languages"]
        )
        written = files.get(f"{name}.references")
        references = [] if written is None else written.decode().split("\n")[:-1]
        return SentencePairs(source, target, references)


load = ParallelText.load

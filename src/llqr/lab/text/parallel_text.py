"""Prepared parallel text, ready for training and evaluation.

>>> from llqr.lab.text import parallel_text
>>> text = parallel_text.load("data/iwslt14")
>>> text.vocabulary.size, len(text.train), text.detokenise(text.valid.target[0])
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llqr.lab.text import moses, prepared_folder
from llqr.lab.text.cleaning import Rules
from llqr.lab.text.corpus import SPLITS
from llqr.lab.text.prepared_text import SUBWORDS, PreparedText
from llqr.lab.text.sentences import SentencePairs, Sentences
from llqr.lab.text.subwords import Subwords

KIND = "parallel text"


@dataclass(frozen=True, kw_only=True)
class ParallelText(PreparedText):
    """A prepared parallel corpus.

    Attributes:
        train: training pairs.
        valid: pairs for choosing a model, with references.
        test: pairs for measuring it, with references.
        languages: of the source and of the target.

    With ``settings["lowercase"]`` the target is lower case and the references are not, so that BLEU must be measured
    case-insensitively. Both languages share the vocabulary.
    """

    train: SentencePairs
    valid: SentencePairs
    test: SentencePairs
    languages: tuple[str, str]

    def encode(self, sentences: Sequence[str]) -> Sentences:
        """The tokens of raw sentences in the source language; an empty sentence has none."""
        rules = Rules(self.languages, lowercase=self.settings["lowercase"])
        words = [" ".join(rules.words(sentence, self.languages[0])) for sentence in sentences]
        return Sentences.of(self.subwords.encode(words))

    def words(self, tokens: Iterable[int]) -> str:
        """Target ``tokens`` as text that is still tokenised by Moses' rules, words separated by spaces."""
        return self.subwords.decode(tokens)

    def detokenise(self, tokens: Iterable[int]) -> str:
        """Target ``tokens`` as plain text, to be compared with a reference; needs sacremoses."""
        return moses.detokenise(self.words(tokens).split(), self.languages[1])


def load(root: Path | str) -> ParallelText:
    """Load what `llqr data` prepared at ``root``: the folder of a name, or one of the preparations in it."""
    place, manifest, files = prepared_folder.read(Path(root), KIND)
    try:
        subwords = Subwords.read(files[SUBWORDS].decode())
        splits = {name: _read_split(name, files, subwords.vocabulary.tokens, manifest) for name in SPLITS}
        return ParallelText(
            **splits,
            subwords=subwords,
            languages=tuple(manifest["settings"]["languages"]),
            settings=manifest["settings"],
            counts=manifest["counts"],
            key=manifest["key"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{place} is damaged: {error}; remove it and prepare the text again.") from error


def _read_split(name: str, files: Mapping[str, bytes], tokens: int, manifest: Mapping[str, Any]) -> SentencePairs:
    source, target = (
        prepared_folder.unpack_sentences(files, f"{name}.{one}", tokens) for one in manifest["settings"]["languages"]
    )
    written = files.get(f"{name}.references")
    references = [] if written is None else written.decode().split("\n")[:-1]
    return SentencePairs(source, target, references)

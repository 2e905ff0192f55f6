"""What parallel text and token streams have in common once they are prepared."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from llqr.lab.text import prepared_folder
from llqr.lab.text.corpus import SPLITS
from llqr.lab.text.subwords import Subwords
from llqr.lab.text.vocabulary import Vocabulary

SUBWORDS = "subwords.json"
"""The file of a prepared folder that holds its encoding."""


@dataclass(frozen=True, kw_only=True)
class PreparedText(ABC):
    """The splits of a prepared text, their encoding, and how they were made.

    Attributes:
        subwords: the encoding.
        settings: how the text was prepared.
        counts: for each split what was read, dropped for each reason, and kept.
        key: a digest of everything that could change a token.
    """

    KIND: ClassVar[str]
    subwords: Subwords
    settings: Mapping[str, Any]
    counts: Mapping[str, Mapping[str, int]]
    key: str

    @property
    def vocabulary(self) -> Vocabulary:
        return self.subwords.vocabulary

    @classmethod
    def load(cls, root: Path | str) -> Self:
        """Load what `llqr data` prepared at ``root``: the folder of a name, or one of the preparations in it."""
        place, manifest, files = prepared_folder.read(Path(root), cls.KIND)
        try:
            subwords = Subwords.read(files[SUBWORDS].decode())
            own = {key: manifest[key] for key in ("settings", "counts", "key")}
            splits = {name: cls._split(name, files, subwords.vocabulary.tokens, own["settings"]) for name in SPLITS}
            return cls(subwords=subwords, **own, **splits)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{place} is damaged: {error}; remove it and prepare the text again.") from error

    @classmethod
    @abstractmethod
    def _split(cls, name: str, files: Mapping[str, bytes], tokens: int, settings: Mapping[str, Any]) -> Any:
        """A split from the files of the folder, whose encoding has so many ``tokens``."""

"""Raw parallel text: two lists of lines for every split."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llqr.lab.text import iwslt, lines

SPLITS = ("train", "valid", "test")
DIRECTION = ("de", "en")
"""Source and target language where they are not given."""


@dataclass(frozen=True)
class RawSplit:
    """Line ``i`` of ``target`` is the translation of line ``i`` of ``source``."""

    name: str
    source: list[bytes]
    target: list[bytes]

    def __post_init__(self) -> None:
        if len(self.source) != len(self.target):
            raise ValueError(
                f"The two sides of {self.name} are not aligned: {len(self.source):,} lines in the source and "
                f"{len(self.target):,} in the target; line i of one must be the translation of line i of the other."
            )
        if not self.source:
            raise ValueError(f"{self.name} must have lines, got none.")

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True)
class RawCorpus:
    """The train split, and valid and test where they are given; ``languages`` are source and target."""

    languages: tuple[str, str]
    splits: Mapping[str, RawSplit]

    def __post_init__(self) -> None:
        if self.languages[0] == self.languages[1]:
            raise ValueError(f"languages must be two different languages, got {self.languages[0]!r} twice.")

    def inputs(self) -> dict[str, dict[str, dict[str, object]]]:
        """The number of lines and the digest of every file."""
        return {
            name: {
                language: {"lines": len(side), "sha256": lines.digest(side)}
                for language, side in zip(self.languages, (split.source, split.target), strict=True)
            }
            for name, split in self.splits.items()
        }


def from_files(splits: Mapping[str, tuple[Path, Path] | None], languages: tuple[str, str] | None = None) -> RawCorpus:
    """The corpus of pairs of files; by default the suffixes give the languages, as in ``train.de train.en.xz``."""
    given = {name: pair for name, pair in splits.items() if pair is not None}
    if "train" not in given:
        raise ValueError("train must be given: the two files to train on.")
    if languages is None:
        names = (path.stem if path.suffix in lines.COMPRESSED else path.name for path in given["train"])
        first, second = (name.rpartition(".")[2] for name in names)
        languages = (first, second)
        if not all(name.isalpha() and len(name) <= 3 for name in languages):
            raise ValueError(
                f"languages must be given, as in de en: they cannot be inferred from the names "
                f"{given['train'][0].name} and {given['train'][1].name}."
            )
    return RawCorpus(languages, {name: RawSplit(name, *map(lines.read_lines, pair)) for name, pair in given.items()})


def from_folder(source: Path, languages: tuple[str, str] | None = None) -> RawCorpus:
    """The corpus under ``source``: IWSLT14 as distributed, or ``train.de``, ``train.en`` and so on."""
    if not source.exists():
        raise FileNotFoundError(f"source must be a folder or an archive, but {source.absolute()} does not exist.")
    languages = languages or DIRECTION
    sides = iwslt.read(source, languages)
    if sides is not None:
        return RawCorpus(languages, {name: RawSplit(name, *both) for name, both in sides.items()})
    found = {name: [lines.find(source, f"{name}.{language}") for language in languages] for name in SPLITS}
    if None in found["train"]:
        raise FileNotFoundError(
            f"No corpus was found in {source.absolute()}: expected train.{languages[0]} and train.{languages[1]} "
            f"(plain, .xz or .gz; and optionally valid.* and test.*), or IWSLT14 as {iwslt.EXPECTED}."
        )
    pairs: dict[str, tuple[Path, Path]] = {}
    for name, (first, second) in found.items():
        if first is not None and second is not None:
            pairs[name] = first, second
        elif first is not None or second is not None:
            there, missing = languages if second is None else languages[::-1]
            raise FileNotFoundError(f"{source / name}.{missing} is missing, although {name}.{there} is there.")
    return from_files(pairs, languages)

"""Raw parallel text: the lines of both sides of every split, as bytes.

A folder holds ``train.de``, ``train.en`` and optionally ``valid.*`` and ``test.*`` (plain, .xz or .gz), or IWSLT14 as
its archive unpacks. Of IWSLT14, exactly the sentences are read that fairseq's ``prepare-iwslt14.sh`` keeps: that script
defines the data on which results on IWSLT14 are compared.
"""

import gzip
import lzma
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

SPLITS = ("train", "valid", "test")
Corpus = dict[str, tuple[list[bytes], list[bytes]]]
"""For every split its source lines and its target lines; line ``i`` of one is the translation of line ``i``."""

COMPRESSED: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open}
"""Suffixes of compressed files, and what opens them."""
MOST_COMPRESSED, LEAST = 100, 2**24
"""Text is compressed to a third or so; a small file that fills the memory is none. `LEAST` bytes are always read."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

TEST_SETS = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")
LINES_LEFT_OUT = (b"<url>", b"<talkid>", b"<keywords>")
TAGS_LEFT_OUT = re.compile(rb"</?title>|</?description>")
SEGMENT = re.compile(rb'<seg id="[0-9]*">\s*|\s*</seg>\s*')
CURLY_APOSTROPHE = "’".encode()


def read(source: Path, languages: tuple[str, str]) -> Corpus:
    """The corpus in the folder ``source``; ``languages`` are those of the source and of the target."""
    if not source.is_dir():
        raise FileNotFoundError(f"source must be a folder, but {source.absolute()} is none.")
    corpus = _iwslt(source, languages) or _files(source, languages)
    for name, (left, right) in corpus.items():
        if len(left) != len(right):
            raise ValueError(
                f"The two sides of {name} are not aligned: {len(left):,} lines in the source and {len(right):,} in the "
                "target; line i of one must be the translation of line i of the other."
            )
    return corpus


def read_lines(path: Path) -> list[bytes]:
    """The lines of a plain, .xz or .gz file.

    They end at line feeds only, as other tools for parallel text do: other separators would misalign two files.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path.absolute()} is missing.")
    try:
        with COMPRESSED.get(path.suffix, open)(path, "rb") as file:
            most = max(LEAST, MOST_COMPRESSED * path.stat().st_size)
            content: bytes = file.read(most + 1)
        if len(content) > most:
            raise ValueError(f"{path} is damaged: it is more than {MOST_COMPRESSED} times as long as its file.")
        lines = content.removeprefix(BYTE_ORDER_MARK).split(b"\n")
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is damaged: {error}.") from error
    return lines if lines[-1] else lines[:-1]


def _files(folder: Path, languages: tuple[str, str]) -> Corpus:
    corpus = {}
    for name in SPLITS:
        sides = []
        for language in languages:
            plain = folder / f"{name}.{language}"
            paths = (folder / f"{plain.name}{ending}" for ending in ("", *COMPRESSED))
            sides.append(next((path for path in paths if path.is_file()), plain))
        if name == "train" or any(path.is_file() for path in sides):
            corpus[name] = read_lines(sides[0]), read_lines(sides[1])
    return corpus


def _iwslt(source: Path, languages: tuple[str, str]) -> Corpus | None:
    """``train`` and ``test`` of IWSLT14, whichever direction its files are named after; None if it is not there."""
    for pair in ("-".join(languages), "-".join(languages[::-1])):
        for folder in (source, source / pair):
            if (folder / f"train.tags.{pair}.{languages[0]}").is_file():
                source_side, target_side = (
                    {"train": _talks(folder, pair, one), "test": _segments(folder, pair, one)} for one in languages
                )
                return {name: (source_side[name], target_side[name]) for name in source_side}
    return None


def _talks(folder: Path, pair: str, language: str) -> list[bytes]:
    """The sentences, titles and descriptions of the talks."""
    lines = read_lines(folder / f"train.tags.{pair}.{language}")
    return [TAGS_LEFT_OUT.sub(b"", line) for line in lines if not any(tag in line for tag in LINES_LEFT_OUT)]


def _segments(folder: Path, pair: str, language: str) -> list[bytes]:
    """The segments of the test sets, with straight apostrophes."""
    files = (read_lines(folder / f"IWSLT14.{name}.{pair}.{language}.xml") for name in TEST_SETS)
    marked = (line for lines in files for line in lines if b"<seg id" in line)
    return [SEGMENT.sub(b"", line).replace(CURLY_APOSTROPHE, b"'") for line in marked]

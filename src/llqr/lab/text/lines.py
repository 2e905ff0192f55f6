"""The lines of text files, plain or compressed, as bytes; whether a line is UTF-8 is checked when it is decoded."""

import gzip
import hashlib
import lzma
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

COMPRESSED: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open}
"""Suffixes of compressed files, and what opens them."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_lines(path: Path) -> list[bytes]:
    """The lines of a plain, .xz or .gz file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path.absolute()} is not a file.")
    try:
        with COMPRESSED.get(path.suffix, open)(path, "rb") as file:
            return split_lines(file.read())
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is damaged: {error}.") from error


def split_lines(content: bytes) -> list[bytes]:
    """Split at line feeds only, as other tools for parallel text do: other separators would misalign two files."""
    lines = content.removeprefix(BYTE_ORDER_MARK).split(b"\n")
    if not lines[-1]:
        lines.pop()
    return lines


def decode(line: bytes) -> str | None:
    """The text of a line; None if it is not UTF-8."""
    try:
        return line.decode()
    except UnicodeDecodeError:
        return None


def digest(lines: Sequence[bytes]) -> str:
    """A digest of the lines, the same whether the file is compressed or not."""
    return hashlib.sha256(b"\n".join(lines)).hexdigest()


def find(folder: Path, name: str) -> Path | None:
    """The file ``name`` in a folder, plain or compressed."""
    candidates = [folder / (name + ending) for ending in ("", *COMPRESSED)]
    return next((path for path in candidates if path.is_file()), None)

"""IWSLT14 as distributed: the archive ``de-en.tgz`` or the folder it unpacks to.

The sentences are exactly those that fairseq's ``prepare-iwslt14.sh`` keeps: that script defines the data on which
results on IWSLT14 are compared.
"""

import re
import tarfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from llqr.lab.text.lines import split_lines

EXPECTED = "de-en.tgz, or the folder de-en from it with train.tags.de-en.* and IWSLT14.TED.*.xml"
TEST_SETS = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")
LINES_LEFT_OUT = (b"<url>", b"<talkid>", b"<keywords>")
TAGS_LEFT_OUT = re.compile(rb"</?title>|</?description>")
SEGMENT = b"<seg id"
SEGMENT_BEGINS = re.compile(rb'<seg id="[0-9]*">\s*')
SEGMENT_ENDS = re.compile(rb"\s*</seg>\s*")
CURLY_APOSTROPHE = "’".encode()


def training_lines(content: bytes) -> list[bytes]:
    """The sentences, titles and descriptions of the talks."""
    kept = (line for line in split_lines(content) if not any(tag in line for tag in LINES_LEFT_OUT))
    return [TAGS_LEFT_OUT.sub(b"", line) for line in kept]


def segments(content: bytes) -> list[bytes]:
    """The segments of an XML file, with straight apostrophes."""
    marked = (line for line in split_lines(content) if SEGMENT in line)
    return [SEGMENT_ENDS.sub(b"", SEGMENT_BEGINS.sub(b"", line)).replace(CURLY_APOSTROPHE, b"'") for line in marked]


def read(source: Path, languages: tuple[str, str]) -> dict[str, list[list[bytes]]] | None:
    """The sentences of both sides of ``train`` and ``test``; None if they are not at ``source``.

    That is the archive, a folder that holds it, or the unpacked folder.
    """
    for pair in ("-".join(languages), "-".join(reversed(languages))):
        marker = f"train.tags.{pair}.{languages[0]}"
        for folder in (source, source / pair):
            if (folder / marker).is_file():
                return _sides(pair, languages, partial(_read_from_folder, folder))
        for archive in (source, source / f"{pair}.tgz"):
            if archive.is_file():
                return _sides(pair, languages, _archive_reader(archive, pair))
    return None


def _sides(pair: str, languages: tuple[str, str], content: Callable[[str], bytes]) -> dict[str, list[list[bytes]]]:
    tests = [[content(f"IWSLT14.{name}.{pair}.{language}.xml") for name in TEST_SETS] for language in languages]
    return {
        "train": [training_lines(content(f"train.tags.{pair}.{language}")) for language in languages],
        "test": [[line for file in files for line in segments(file)] for files in tests],
    }


def _read_from_folder(folder: Path, name: str) -> bytes:
    path = folder / name
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: expected IWSLT14 as {EXPECTED}.")
    return path.read_bytes()


def _archive_reader(archive: Path, pair: str) -> Callable[[str], bytes]:
    """Reads all text files of the archive into memory; nothing is unpacked to disk."""
    try:
        with tarfile.open(archive) as tar:
            names = {member: Path(member.name).name for member in tar if member.isfile()}
            files = {name: tar.extractfile(member) for member, name in names.items() if pair in name}
            contents = {name: file.read() for name, file in files.items() if file is not None}
    except (tarfile.TarError, EOFError, zlib.error) as error:
        reason = str(error).partition("\n")[0].rstrip(":")  # tarfile lists every format that it is not
        raise ValueError(f"{archive} is damaged, or no archive: {reason}; expected IWSLT14 as {EXPECTED}.") from error

    def read(name: str) -> bytes:
        if name not in contents:
            raise FileNotFoundError(f"{archive} holds no {name}: expected IWSLT14 as {EXPECTED}.")
        return contents[name]

    return read

"""Files that are written whole or not at all, and one sentence instead of a traceback where that is impossible."""

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO
from zipfile import ZipFile

from llqr.lab.errors import CannotWrite, ConfigurationError


@contextmanager
def explained(path: Path, option: str = "") -> Iterator[None]:
    """An `OSError` inside is about writing ``path``, which ``option`` named."""
    try:
        yield
    except OSError as error:
        where = f"{option}: {path}" if option else str(path)
        raise CannotWrite(f"{where} cannot be written: {error.strerror or error}.") from error


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of ``path`` when the block ends; after an error or a crash ``path`` is as before.

    Until then it has a name of its own: several processes may write the same file.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with explained(path):
            with part.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def write_text(path: Path, text: str) -> None:
    """Atomically, so that a reader never sees half a file; its folder is made if it is not there."""
    make_folder(path.parent)
    with replacing(path) as file:
        file.write(text.encode())


def check_archive(path: Path) -> None:
    """Refuse a file of `torch.save` that is damaged or would take much more memory than disk; torch compresses none."""
    with ZipFile(path) as archive:
        entries = archive.infolist()
        pickles = [entry for entry in entries if entry.filename.endswith("data.pkl")]
        if sum(entry.file_size for entry in entries) > path.stat().st_size:
            raise ValueError("its parts are longer than the file")
        if any(b"bytearray" in archive.read(entry) for entry in pickles):  # allowed by torch, of any length
            raise ValueError("it holds a bytearray")
        if damaged := archive.testzip():
            raise ValueError(f"its part {damaged} is damaged")


def make_folder(path: Path) -> None:
    with explained(path):
        path.mkdir(parents=True, exist_ok=True)


def check_folder(option: str, folder: Path) -> None:
    """Refuse a folder that cannot be made or written to, or whose disk is full; nothing is left behind."""
    nearest = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    with explained(folder, option), tempfile.TemporaryFile(dir=nearest) as file:
        file.write(bytes(4096))
        file.flush()
        os.fsync(file.fileno())


def check_file(option: str, path: Path, ending: str = "") -> None:
    """Refuse a file of another kind than its ``ending`` says, or that cannot be made, replaced or appended to."""
    if not path.name.endswith(ending):
        raise ConfigurationError(f"{option} must end in {ending}, got {path}.")
    with explained(path, option):
        check_folder(option, path.parent)
        if path.exists():
            path.open("ab").close()

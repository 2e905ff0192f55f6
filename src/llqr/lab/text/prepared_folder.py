"""Prepared folders: complete or absent, and the same key always means the same content.

``root/<key>/`` holds one preparation; the key is a digest of everything it depends on. ``root/current`` names the one
requested last. A folder is written under a temporary name and renamed when it is complete. `PreparedText` is what one
holds, once it is read.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from llqr.lab.text.corpus import SPLITS
from llqr.lab.text.sentences import Sentences
from llqr.lab.text.subwords import Subwords, Vocabulary
from llqr.lab.writing import write_text

FORMAT = 1
"""Incremented whenever the same input gives different files."""
MANIFEST = "prepared.json"
SUBWORDS = "subwords.json"
CURRENT = "current"
PARTIAL = ".partial-"
NAME = re.compile(r"\w[\w.-]*")
"""Valid names of a prepared text."""


def make(
    root: Path, facts: Mapping[str, Any], prepare: Callable[[], tuple[dict[str, Any], dict[str, bytes]]]
) -> tuple[Path, bool]:
    """The folder under ``root`` for ``facts``, on which alone its name depends, and whether it was made now.

    It becomes the one that `find` returns.

    ``prepare`` is called if the folder does not exist yet; it returns further entries of the manifest, and the files.
    """
    key = hashlib.sha256(json.dumps({"format": FORMAT, **facts}, sort_keys=True).encode()).hexdigest()[:16]
    missing = not is_finished(root / key)
    if missing:
        entries, files = prepare()
        write(root, key, {**facts, **entries}, files)
    write_text(root / CURRENT, key + "\n")
    return root / key, missing


def write(root: Path, key: str, facts: Mapping[str, Any], files: Mapping[str, bytes]) -> Path:
    """Write ``root/key`` with ``files`` and a manifest of ``facts``, unless another process has just done so."""
    root.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=root))
    try:
        digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        manifest = {"format": FORMAT, "key": key, **facts, "files": digests}
        whole = {**files, MANIFEST: (json.dumps(manifest, indent=1, ensure_ascii=False) + "\n").encode()}
        for name, content in whole.items():
            with open(partial / name, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        partial.chmod(0o755)  # mkdtemp gives access to the owner only
        try:
            partial.rename(root / key)
        except OSError:
            if not is_finished(root / key):
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return root / key


def is_finished(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def find(root: Path) -> Path:
    """The prepared folder: ``root`` itself, or the one that ``root/current`` names."""
    if is_finished(root):
        return root
    current = root / CURRENT
    if current.is_file():
        folder = root / current.read_text().strip()
        if is_finished(folder):
            return folder
    raise FileNotFoundError(
        f"{root.absolute()} holds no prepared text; prepare it with: llqr data {root.name} --data-dir "
        f"{root.parent}, and --source FOLDER for translation or --text FILE for language modelling."
    )


def read(root: Path, kind: str) -> tuple[Path, dict[str, Any], dict[str, bytes]]:
    """The folder found at ``root``, its manifest and its files, verified against their digests."""
    folder = find(root)
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        number, digests, written = manifest["format"], manifest["files"], manifest["kind"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / MANIFEST} is damaged: {error!r}.") from error
    if number != FORMAT:
        raise ValueError(f"{folder} has format {number}, this version reads {FORMAT}; prepare the text again.")
    if written != kind:
        raise ValueError(f"{folder} was prepared as {written}, but {kind} was expected.")
    files = {}
    for name, expected in digests.items():
        path = folder / name
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing; remove {folder} and prepare the text again.")
        files[name] = path.read_bytes()
        if hashlib.sha256(files[name]).hexdigest() != expected:
            raise ValueError(f"{path} is damaged; remove {folder} and prepare the text again.")
    return folder, manifest, files


def pack(tokens: Tensor, vocabulary: int) -> bytes:
    """Token numbers below ``vocabulary`` as raw little-endian integers."""
    return tokens.numpy().astype(_width(vocabulary)).tobytes()


def unpack(content: bytes, vocabulary: int) -> Tensor:
    """The inverse of `pack`, as int32."""
    return torch.from_numpy(np.frombuffer(content, _width(vocabulary)).astype(np.int32))


def pack_sentences(sentences: Sentences, name: str, vocabulary: int) -> dict[str, bytes]:
    """The files of ``sentences``."""
    lengths = sentences.lengths.numpy().astype("<u4").tobytes()
    return {f"{name}.tokens": pack(sentences.tokens, vocabulary), f"{name}.lengths": lengths}


def unpack_sentences(files: Mapping[str, bytes], name: str, vocabulary: int) -> Sentences:
    """The inverse of `pack_sentences`."""
    lengths = torch.from_numpy(np.frombuffer(files[f"{name}.lengths"], "<u4").astype(np.int64))
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return Sentences(unpack(files[f"{name}.tokens"], vocabulary), offsets)


def _width(vocabulary: int) -> str:
    return "<u2" if vocabulary <= 2**16 else "<u4"


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
        place, manifest, files = read(Path(root), cls.KIND)
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

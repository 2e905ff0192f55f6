"""Any text file as one long sequence of tokens, for language modelling.

The encoding works on bytes: spaces and line ends are part of the text, nothing is normalised, and decoding the tokens
reproduces the file. The last lines are held out for validation and test.

>>> from llqr.lab.text import token_stream
>>> text = token_stream.load("data/novels")
>>> text.vocabulary.size, len(text.train), text.decode(text.valid[:20].tolist())
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llqr.lab.text import lines, prepared_folder, subwords
from llqr.lab.text.prepared_folder import SUBWORDS, PreparedText
from llqr.lab.text.stages import Stages


@dataclass(frozen=True)
class StreamSettings:
    """Everything besides the text itself that determines its tokens.

    Attributes:
        merges: number of merges of the byte-pair encoding, which is learned on the training text.
        held_out: of one text, the fraction of the lines used for validation, and again for the test, from its end.
    """

    merges: int = 10_000
    held_out: float = 0.02

    def __post_init__(self) -> None:
        if self.merges < 0:
            raise ValueError(f"merges must not be negative, got {self.merges}.")
        if not 0 < self.held_out < 0.5:
            raise ValueError(f"held_out must lie between 0 and 0.5, got {self.held_out}.")


@dataclass(frozen=True, kw_only=True)
class TokenStream(PreparedText):
    """A prepared text file.

    Attributes:
        train, valid, test: int32, the tokens of each split.

    The ``counts`` include bytes and tokens, which turn a perplexity into bits per byte, comparable across vocabularies.
    """

    KIND = "a stream of text"
    train: Tensor
    valid: Tensor
    test: Tensor

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, for example of a prompt."""
        return self.subwords.encode([text])[0]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of ``tokens``."""
        return self.subwords.decode(tokens)

    @classmethod
    def _split(cls, name: str, files: Mapping[str, bytes], tokens: int, settings: Mapping[str, Any]) -> Tensor:
        return prepared_folder.unpack(files[f"{name}.tokens"], tokens)


load = TokenStream.load


def prepare_stream(
    path: Path, settings: StreamSettings, root: Path, *, stages: Stages | None = None
) -> tuple[Path, bool]:
    """Prepare the file at ``path`` in a folder under ``root`` unless it is there; the folder, and whether it is new."""
    read = lines.read_lines(path)
    facts: dict[str, Any] = {
        "kind": TokenStream.KIND,
        "settings": asdict(settings),
        "versions": {"tokenizers": version("tokenizers")},  # another one may give other tokens
        "inputs": {"text": {"lines": len(read), "sha256": lines.digest(read)}},
    }
    return prepared_folder.make(root, facts, lambda: _make(read, settings, stages or Stages()))


def _make(read: list[bytes], settings: StreamSettings, stages: Stages) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Further entries of the manifest, and the files."""
    held = int(len(read) * settings.held_out)
    if held < 1:
        raise ValueError(f"held_out must be at least one line, got {settings.held_out} of {len(read)} lines.")
    parts = {"train": read[: -2 * held], "valid": read[-2 * held : -held], "test": read[-held:]}
    kept = {name: [f"{text}\n" for text in map(lines.decode, part) if text is not None] for name, part in parts.items()}
    for name, texts in kept.items():
        if not texts:
            raise ValueError(f"{name} must have lines that are UTF-8, got none of {len(parts[name])}.")
    with stages.stage("subwords", settings.merges, "merges") as advance:
        learned = subwords.learn(lambda: kept["train"], settings.merges, "bytes")
        advance(settings.merges)
    files, counts = {SUBWORDS: learned.write().encode()}, {}
    with stages.stage("tokens", sum(map(len, kept.values())), "lines") as advance:
        for name, texts in kept.items():
            encoded = learned.encode_in_parts(texts, advance)
            tokens = torch.cat([torch.tensor(list(chain.from_iterable(part)), dtype=torch.int32) for part in encoded])
            files[f"{name}.tokens"] = prepared_folder.pack(tokens, learned.vocabulary.tokens)
            counts[name] = {
                "read": len(parts[name]),
                "bad_utf8": len(parts[name]) - len(texts),
                "kept": len(texts),
                "bytes": sum(len(text.encode()) for text in texts),
                "tokens": len(tokens),
            }
    return {"vocabulary": asdict(learned.vocabulary), "counts": counts}, files

"""What a recipe must know of a task before any data is read: its options, its networks, what its data ask of these."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from llqr.lab import data, models
from llqr.lab.models.language_model import LanguageModel
from llqr.lab.models.transformer import TranslationTransformer
from llqr.lab.text import prepared_folder
from llqr.lab.text.pair_batches import SHAPES

ASSUMED_VOCABULARY = 10_000
"""Tokens that sizes are worked out with before a text is prepared."""


class Domain(ABC):
    """A family of data sets and the networks for them. It reads no samples."""

    @abstractmethod
    def options(self, name: str) -> type:
        """The options of the data set ``name``; a `ValueError` if there is none of this name."""

    @abstractmethod
    def build(self, model: str, arguments: dict[str, Any], name: str, root: Path, options: Any) -> nn.Module:
        """A network for the data set ``name``: what this asks of it, with further ``arguments``."""

    def steps_an_epoch(self, name: str, batch_size: int, last: str) -> int | None:
        """How many steps an epoch has, where that is known without reading the data."""
        return None

    def remark(self, name: str, root: Path) -> str:
        """What the sizes of a network depend on that is not known yet."""
        return ""


class Images(Domain):
    """The sets of labelled images in `data`."""

    def options(self, name: str) -> type:
        return data.source(name).options

    def build(self, model: str, arguments: dict[str, Any], name: str, root: Path, options: Any) -> nn.Module:
        return models.build(model, **data.source(name).model_arguments(options) | arguments)

    def steps_an_epoch(self, name: str, batch_size: int, last: str) -> int:
        count = data.source(name).train_count
        return count // batch_size if last == "drop" else -(-count // batch_size)


@dataclass(frozen=True)
class PreparedText(Domain):
    """Text that `llqr data` prepared, under any name."""

    networks: dict[str, Callable[..., nn.Module]]
    accepts: type

    def options(self, name: str) -> type:
        if not prepared_folder.NAME.fullmatch(name):
            raise ValueError(f"data must be the name of a prepared text, got {name!r}.")
        return self.accepts

    def build(self, model: str, arguments: dict[str, Any], name: str, root: Path, options: Any) -> nn.Module:
        if model not in self.networks:
            raise ValueError(f"model must be one of {', '.join(self.networks)}, got {model!r}.")
        try:
            vocabulary = _vocabulary(root / name) or ASSUMED_VOCABULARY
            return self.networks[model](**options.model_arguments() | {"vocabulary": vocabulary} | arguments)
        except TypeError as error:  # an option that this network does not have
            raise TypeError(f"Model {model!r}: {error}.") from error

    def remark(self, name: str, root: Path) -> str:
        prepared = _vocabulary(root / name) is not None
        return "" if prepared else f"{name} is not prepared yet: sizes are those for {ASSUMED_VOCABULARY:,} tokens"


def _vocabulary(root: Path) -> int | None:
    """The size of the vocabulary of the text that was prepared there, if there is one."""
    try:
        return json.loads((prepared_folder.find(root) / prepared_folder.MANIFEST).read_text())["vocabulary"]["size"]
    except (OSError, ValueError, KeyError):
        return None


@dataclass(frozen=True)
class Pairs:
    """Options of parallel text: batches come in at most so many ``shapes``."""

    shapes: int = SHAPES

    def __post_init__(self) -> None:
        if self.shapes < 1:
            raise ValueError(f"shapes must be at least 1, got {self.shapes}.")

    def model_arguments(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class Stream:
    """Options of running text: windows of ``context`` tokens."""

    context: int = 256

    def __post_init__(self) -> None:
        if self.context < 1:
            raise ValueError(f"context must be at least 1, got {self.context}.")

    def model_arguments(self) -> dict[str, Any]:
        return {"context": self.context}


@dataclass(frozen=True)
class Smoothed:
    """Options of a cross-entropy."""

    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing must lie in [0, 1), got {self.label_smoothing}.")


@dataclass(frozen=True)
class Classification(Smoothed):
    """Options of the task of telling classes apart."""


@dataclass(frozen=True)
class Translation(Smoothed):
    """Options of translation: how the text is made that BLEU is measured on.

    ``max_length`` is ``(a, b)``: a source of ``S`` tokens is translated into at most ``a S + b``.
    """

    beam: int = 5
    length_penalty: float = 1.0
    max_length: tuple[float, ...] = field(default=(1.2, 10.0))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beam < 1:
            raise ValueError(f"beam must be at least 1, got {self.beam}.")
        if len(self.max_length) != 2 or not all(part >= 0 for part in self.max_length):
            raise ValueError(f"max_length must be two numbers, none of them negative, got {list(self.max_length)}.")


@dataclass(frozen=True)
class Language(Smoothed):
    """Options of language modelling."""


@dataclass(frozen=True)
class TaskKind:
    """The options of a task, and where its data come from."""

    options: type
    domain: Domain


TASKS = {
    "classification": TaskKind(Classification, Images()),
    "translation": TaskKind(Translation, PreparedText({"transformer": TranslationTransformer}, Pairs)),
    "language": TaskKind(Language, PreparedText({"gpt": LanguageModel}, Stream)),
}

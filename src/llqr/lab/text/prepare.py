"""Prepares parallel text: tokenisation, cleaning, splits and joint subwords, as in fairseq's recipe for IWSLT14."""

from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

from llqr.lab.text import prepared_folder, subwords
from llqr.lab.text.cleaning import Rules
from llqr.lab.text.corpus import RawCorpus
from llqr.lab.text.parallel_text import ParallelText
from llqr.lab.text.prepared_text import SUBWORDS
from llqr.lab.text.sentences import Sentences
from llqr.lab.text.splits import make_splits
from llqr.lab.text.stages import Stages
from llqr.lab.text.vocabulary import UNK
from llqr.lab.text.workers import cores


@dataclass(frozen=True)
class ParallelTextSettings(Rules):
    """Everything besides the text itself that determines its tokens.

    Attributes:
        merges: number of merges of the byte-pair encoding, learned on the training text.
        valid_every: without validation files, one in this many of the kept training pairs is used for validation.
    """

    merges: int = 10_000
    valid_every: int = 23

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.merges < 0:
            raise ValueError(f"merges must not be negative, got {self.merges}.")
        if self.valid_every < 3:
            raise ValueError(f"valid_every must be at least 3, got {self.valid_every}.")


def prepare(
    corpus: RawCorpus,
    settings: ParallelTextSettings,
    root: Path,
    *,
    stages: Stages | None = None,
    processes: int | None = None,
) -> tuple[Path, bool]:
    """Prepare ``corpus`` in a folder under ``root`` unless it is there; the folder, and whether it was made now.

    So many ``processes`` tokenise (default: one per core); the result does not depend on it.
    """
    facts: dict[str, Any] = {
        "kind": ParallelText.KIND,
        "settings": asdict(settings),
        "versions": {name: version(name) for name in ("sacremoses", "tokenizers")},  # others may give other tokens
        "inputs": corpus.inputs(),
    }
    return prepared_folder.make(root, facts, lambda: _make(corpus, settings, stages or Stages(), processes or cores()))


def _make(
    corpus: RawCorpus, settings: ParallelTextSettings, stages: Stages, processes: int
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Further entries of the manifest, and the files."""
    splits = make_splits(corpus, settings, settings.valid_every, stages, processes)
    train = splits["train"]
    with stages.stage("subwords", settings.merges, "merges") as advance:
        learned = subwords.learn(lambda: chain.from_iterable(train.words), settings.merges, "words")
        advance(settings.merges)
    files, counts = {SUBWORDS: learned.write().encode()}, {}
    with stages.stage("tokens", 2 * sum(map(len, splits.values())), "sentences") as advance:
        for name, split in splits.items():
            parts = [learned.encode_in_parts(split.side(number), advance) for number in range(2)]
            sides = [Sentences.of([tokens for part in side for tokens in part]) for side in parts]
            for language, side in zip(corpus.languages, sides, strict=True):
                files |= prepared_folder.pack_sentences(side, f"{name}.{language}", learned.vocabulary.tokens)
            if name != "train":
                files[f"{name}.references"] = "".join(line + "\n" for line in split.written).encode()
            source, target = (side.tokens for side in sides)
            counts[name] = split.counts | {
                "source_tokens": len(source),
                "target_tokens": len(target),
                "unknown_tokens": int((source == UNK).sum() + (target == UNK).sum()),
            }
    return {"vocabulary": asdict(learned.vocabulary), "counts": counts}, files

"""Prepares parallel text: tokenisation, cleaning, splits and joint subwords, as in fairseq's recipe for IWSLT14."""

import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from llqr.lab.machine import cores
from llqr.lab.text import prepared_folder, subwords
from llqr.lab.text.cleaning import REASONS, Outcome, Rules, process
from llqr.lab.text.corpus import SPLITS, RawCorpus, RawSplit
from llqr.lab.text.parallel_text import ParallelText
from llqr.lab.text.prepared_folder import SUBWORDS
from llqr.lab.text.sentences import Sentences
from llqr.lab.text.stages import Stages
from llqr.lab.text.subwords import UNK

PAIRS_IN_A_PIECE = 500
PAIRS_FOR_PROCESSES = 10_000
"""With fewer pairs, starting the processes would take longer than they save."""


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


@dataclass(frozen=True)
class Split:
    """The pairs of a split that are kept.

    Attributes:
        words: source and target, tokenised, words separated by spaces.
        written: the target before tokenisation.
        counts: how many pairs were read, dropped for each of the `REASONS`, held out for another split, and kept.
    """

    words: list[tuple[str, str]]
    written: list[str]
    counts: dict[str, int]

    def __len__(self) -> int:
        return len(self.words)

    def side(self, number: int) -> list[str]:
        return [pair[number] for pair in self.words]


def make_splits(corpus: RawCorpus, rules: Rules, valid_every: int, stages: Stages, processes: int) -> dict[str, Split]:
    """All three splits; those missing from ``corpus`` are held out from its training pairs."""
    total = sum(map(len, corpus.splits.values()))
    splits: dict[str, Split] = {}
    with (
        stages.stage("words", total, "pairs") as advance,
        workers(processes if total >= PAIRS_FOR_PROCESSES else 1) as map_pieces,
    ):
        for name, raw in corpus.splits.items():
            pairs = list(zip(raw.source, raw.target, strict=True))
            pieces = [pairs[i : i + PAIRS_IN_A_PIECE] for i in range(0, len(pairs), PAIRS_IN_A_PIECE)]
            outcomes: list[Outcome] = []
            for part in map_pieces(process, pieces, repeat(rules), repeat(name == "train")):
                outcomes += part
                advance(len(part))
            splits[name] = _sort_out(raw, outcomes)
    splits |= _hold_out(splits["train"], [name for name in SPLITS if name not in splits], valid_every)
    for name, split in splits.items():
        if not len(split):
            raise ValueError(f"{name} must have pairs that are kept, got none: {split.counts}.")
    return {name: splits[name] for name in SPLITS}


def _sort_out(raw: RawSplit, outcomes: list[Outcome]) -> Split:
    """The kept pairs, and how often each reason to drop one occurred."""
    dropped = Counter(outcome for outcome in outcomes if isinstance(outcome, str))
    words = [outcome for outcome in outcomes if not isinstance(outcome, str)]
    lines = [line for line, outcome in zip(raw.target, outcomes, strict=True) if not isinstance(outcome, str)]
    counts = _counts(read=len(raw), kept=len(words)) | dropped
    return Split(words, [line.decode().strip() for line in lines], counts)


def _hold_out(train: Split, names: list[str], valid_every: int) -> dict[str, Split]:
    """The splits ``names``, taken from the training pairs, and the training pairs that remain.

    Of every ``valid_every`` kept pairs the last goes to validation, as in fairseq's recipe for IWSLT14, and one in the
    middle to the test split.
    """
    place = {"valid": valid_every - 1, "test": valid_every // 2 - 1}
    owner = {place[name]: name for name in names}
    rows: dict[str, list[int]] = {"train": [], **{name: [] for name in names}}
    for row in range(len(train)):
        rows[owner.get(row % valid_every, "train")].append(row)
    made = {}
    for name, chosen in rows.items():
        counts = _counts(read=len(chosen), kept=len(chosen))
        if name == "train":
            counts = train.counts | {"held_out": len(train) - len(chosen), "kept": len(chosen)}
        made[name] = Split([train.words[i] for i in chosen], [train.written[i] for i in chosen], counts)
    return made


def _counts(*, read: int, kept: int) -> dict[str, int]:
    return {"read": read, **dict.fromkeys(REASONS, 0), "held_out": 0, "kept": kept}


Map = Callable[..., Iterable[Any]]


@contextmanager
def workers(processes: int) -> Iterator[Map]:
    """A `map` that runs in ``processes`` processes; with one process it is the built-in `map`."""
    if processes == 1:
        yield map
        return
    # Spawned, not forked: this process has threads of torch and of a progress display.
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), initializer=_prepare_worker)
    try:
        yield pool.map
    finally:
        pool.shutdown(cancel_futures=True)


def _prepare_worker() -> None:
    """Leave signals to the parent process, and exit when it exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:  # None in the process that started everything
        parent.join()
        os._exit(1)

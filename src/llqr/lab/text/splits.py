"""Training, validation and test pairs, tokenised, from the raw lines."""

from collections import Counter
from dataclasses import dataclass
from itertools import repeat

from llqr.lab.text.cleaning import REASONS, Outcome, Rules, process
from llqr.lab.text.corpus import SPLITS, RawCorpus, RawSplit
from llqr.lab.text.stages import Stages
from llqr.lab.text.workers import workers

PAIRS_IN_A_PIECE = 500
PAIRS_FOR_PROCESSES = 10_000
"""With fewer pairs, starting the processes would take longer than they save."""


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

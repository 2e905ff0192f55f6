"""Made-up texts that are learned in seconds, prepared as real ones are."""

import random
from pathlib import Path

from llqr.lab.text.prepare import PairSettings, StreamSettings, prepare_pairs, prepare_stream

SYLLABLES = ("ba", "de", "fi", "go", "ku", "la", "me", "ni", "po", "ru")


def words(count):
    return [a + b for a in SYLLABLES for b in SYLLABLES][:count]


def reversal(root: Path, name: str = "reversal", train: int = 600, held_out: int = 40, seed: int = 0) -> Path:
    """Pairs of a sentence of 4 to 7 words out of 30 and the same words from the last to the first."""
    draw, known = random.Random(seed), words(30)

    def split(count):
        sentences = [draw.choices(known, k=draw.randint(4, 7)) for _ in range(count)]
        return [" ".join(one).encode() for one in sentences], [" ".join(one[::-1]).encode() for one in sentences]

    corpus = {"train": split(train), "valid": split(held_out), "test": split(held_out)}
    prepare_pairs(corpus, PairSettings(("de", "en"), merges=60), root / name)
    return root


def counting(root: Path, name: str = "counting", lines: int = 800, seed: int = 0) -> Path:
    """Running text in which a word decides the next one: every line goes on through a circle of words."""
    draw, known = random.Random(seed), words(20)
    written = []
    for _ in range(lines):
        first = draw.randrange(len(known))
        written.append(" ".join(known[(first + i) % len(known)] for i in range(6)))
    path = root / f"{name}.txt"
    root.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(written) + "\n")
    prepare_stream(path, StreamSettings(merges=60, held_out=0.05), root / name)
    return root

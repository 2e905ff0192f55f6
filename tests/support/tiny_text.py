"""Made-up parallel text that is learned in seconds, prepared as real text is."""

import random
from pathlib import Path

from llqr.lab.text.prepared import PairSettings, prepare_pairs

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

"""A small transformer on the Stanford Sentiment Treebank, two classes, from scratch, with SGD or AdamW as base.

SST=folder llqr compare results/bases/sst.py:sgdm --methods sgdm,llqr,sam,llqr+sam --seeds 5

The folder has binary.train.txt, .dev.txt and .test.txt: a label, a space, and the words of a sentence per line.
"""

import os
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from llqr.lab import Experiment

WIDTH, HEADS, LAYERS, LONGEST = 64, 4, 2, 40


def read(part: str) -> tuple[list[list[str]], Tensor]:
    lines = Path(os.environ["SST"], f"binary.{part}.txt").read_text().lower().splitlines()
    return [line.split()[1:] for line in lines], torch.tensor([int(line.split()[0]) for line in lines])


texts = {part: read(part) for part in ("train", "dev", "test")}
counts = Counter(word for sentence in texts["train"][0] for word in sentence)
vocabulary = {word: i for i, word in enumerate(sorted(w for w, n in counts.items() if n > 1), start=2)}  # 0: none


def encoded(part: str) -> tuple[Tensor, Tensor]:
    """Words as numbers, 1 for those that are not known, filled up with 0."""
    sentences, labels = texts[part]
    rows = [[vocabulary.get(word, 1) for word in sentence[:LONGEST]] for sentence in sentences]
    return torch.tensor([row + [0] * (LONGEST - len(row)) for row in rows]), labels


train, dev, test = (encoded(part) for part in texts)


class Block(nn.Module):
    """Attention and a hidden layer, each behind a normalisation; written out, so that it has second derivatives."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.hidden = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, empty: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(empty[:, None, None], float("-inf")).softmax(-1)
        x = x + self.drop(self.out((weights @ v).transpose(1, 2).flatten(2)))
        return x + self.drop(self.hidden(self.after(x)))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(2 + len(vocabulary), WIDTH)
        self.places = nn.Parameter(0.1 * torch.randn(LONGEST, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.end = nn.Sequential(nn.LayerNorm(WIDTH), nn.Dropout(0.3), nn.Linear(WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        empty = x == 0
        h = self.words(x) + self.places
        for block in self.blocks:
            h = block(h, empty)
        kept = (~empty).unsqueeze(-1).float()
        return self.end((h * kept).sum(1) / kept.sum(1))


def experiment(base: str) -> Experiment:
    structure = {"words.weight": "diagonal", "*": "e-kfac"}  # the table has a row for every word
    own = {"model": Transformer(), "loss": cross_entropy, "train": train, "valid": dev, "test": test, "base": base}
    decay = 1e-2 if base == "adamw" else 1e-4
    return Experiment(**own, epochs=10, batch_size=64, structure=structure, every=27, weight_decay=decay)


def sgdm() -> Experiment:
    return experiment("sgdm")


def adamw() -> Experiment:
    return experiment("adamw")

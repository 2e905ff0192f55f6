"""Methods compared on one's own model and data.

llqr compare examples/own_experiment.py --methods sgdm,sam,llqr+sam --seeds 3
python examples/own_experiment.py        # the same from a program, as a notebook would
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset, random_split

from llqr.lab import Experiment, compare

# What takes long and is the same for all seeds stands outside of the function.
x, y = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(y))
train, test = random_split(data, [1437, 360], torch.Generator().manual_seed(0))


def experiment():
    model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 10))
    return Experiment(model=model, loss=cross_entropy, train=train, test=test, epochs=20, batch_size=64, rho=0.1)


if __name__ == "__main__":
    epochs, seeds = (int(word) for word in sys.argv[1:3] or ("20", "3"))
    print(compare(__file__, seeds=seeds, settings={"training.epochs": epochs}))

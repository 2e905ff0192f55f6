"""Train a small network on scikit-learn's digits with SGDM, SAM, LLQR and LLQR+SAM, and compare.

python examples/digits.py [--epochs 30] [--seeds 3]
"""

from __future__ import annotations

import argparse
import statistics

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import llqr

METHODS = ("sgdm", "sam", "llqr", "llqr+sam")
BATCH = 64


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Train and test images (8 x 8, flattened, in [0, 1]) and labels; the last third is the test set."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    cut = len(x) * 2 // 3
    return x[:cut], y[:cut], x[cut:], y[cut:]


def train(method: str, seed: int, epochs: int, progress: Progress) -> tuple[float, float]:
    """Test accuracy and test loss after training."""
    torch.manual_seed(seed)
    x, y, x_test, y_test = digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    geometry = llqr.Geometry(model, cross_entropy, structure="e-kfac", every=50) if "llqr" in method else None
    opt = llqr.build(method, base, geometry=geometry, **({"rho": 0.1} if "sam" in method else {}))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, epochs)
    job = progress.add_task(f"{method}, seed {seed}", total=epochs)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(BATCH):
            xb, yb = x[rows], y[rows]

            def closure(xb: Tensor = xb, yb: Tensor = yb) -> Tensor:
                opt.zero_grad()
                loss = cross_entropy(model(xb), yb)
                loss.backward()
                return loss

            opt.step(closure, batch=(xb, yb))
        scheduler.step()
        progress.advance(job)
    progress.remove_task(job)
    with torch.no_grad():
        logits = model(x_test)
    return (logits.argmax(1) == y_test).double().mean().item() * 100, cross_entropy(logits, y_test).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    table = Table("method", "test accuracy, %", "test loss", title=f"digits, n = {arguments.seeds} seeds, mean ± std")
    with Progress() as progress:
        for method in METHODS:
            runs = [train(method, seed, arguments.epochs, progress) for seed in range(arguments.seeds)]
            cells = []
            for numbers, digits_shown in zip(zip(*runs, strict=True), (2, 4), strict=True):
                spread = statistics.stdev(numbers) if len(numbers) > 1 else 0.0
                cells.append(f"{statistics.mean(numbers):.{digits_shown}f} ± {spread:.{digits_shown}f}")
            table.add_row(method, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()

"""Our SAM and F-SAM steps beside those of pytorch_optimizer: same model, same batch, same base optimizer.

    python benchmarks/peers.py [--repeats 40] [--threads 2] [--json FILE]

A step is two forward and backward passes and all that the optimizer does. The steps are interleaved, each pair in the
opposite order of the last, so that load on the machine hits both alike; a ratio is the median over the pairs of
(our time / their time), below 1 where ours is faster. Theirs runs with `foreach` off (its default on a CPU) and on.

The passes are the same work on both sides and take nearly all of the time. What the optimizers themselves add is
measured apart, by steps whose passes only put ready gradients in place. Ours then does more: it keeps BatchNorm
statistics and dropout masks of the second pass from differing, which theirs leaves to the user.

The row "control" sets two copies of theirs against each other: what it differs from 1 by is the noise of the machine.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib.metadata
import itertools
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytorch_optimizer
import torch
from torch import Tensor, nn

import llqr
from llqr.lab import models

Step = Callable[[], None]
SETTINGS = {"lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4}
RHO, LAM = 0.05, 0.9


class Encoder(nn.Module):
    """A transformer encoder of four layers with a linear head on the mean token."""

    def __init__(self, vocabulary: int = 1000, dim: int = 128, classes: int = 10) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(dim, nhead=4, dim_feedforward=4 * dim, dropout=0.0, batch_first=True)
        self.embed = nn.Embedding(vocabulary, dim)
        self.encode = nn.TransformerEncoder(layer, num_layers=4, enable_nested_tensor=False)
        self.head = nn.Linear(dim, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encode(self.embed(tokens)).mean(dim=1))


def resnet(batch: int) -> tuple[nn.Module, Tensor]:
    return models.build("resnet18", classes=10, width=16), torch.randn(batch, 3, 32, 32)


def transformer(batch: int) -> tuple[nn.Module, Tensor]:
    return Encoder(), torch.randint(1000, (batch, 32))


WORKLOADS = {"resnet18 width 16": resnet, "transformer, 4 layers": transformer}
ROWS = [("SAM", "control"), ("SAM", "default"), ("SAM", "foreach"), ("F-SAM", "default"), ("F-SAM", "foreach")]


def ours(method: str, foreach: bool, model: nn.Module) -> torch.optim.Optimizer:
    # Their SAM hands `foreach` on to its base optimizer, their F-SAM does not; the bases must be the same.
    base = torch.optim.SGD(model.parameters(), foreach=True if foreach and method == "SAM" else None, **SETTINGS)
    return llqr.SAM(base, rho=RHO) if method == "SAM" else llqr.FriendlySAM(base, rho=RHO, lam=LAM)


def theirs(method: str, foreach: bool, model: nn.Module) -> torch.optim.Optimizer:
    settings = {"rho": RHO, "foreach": True if foreach else None, **SETTINGS}
    if method == "SAM":
        return pytorch_optimizer.SAM(model.parameters(), torch.optim.SGD, **settings)
    return pytorch_optimizer.FriendlySAM(model.parameters(), torch.optim.SGD, lmbda=LAM, **settings)


def real_pass(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    return loss


def ready_gradients(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Stands for a pass: fresh gradient tensors, as a backward pass makes them, without computing anything."""
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    return torch.zeros(())


def step_of(opt: torch.optim.Optimizer, run_pass: Callable[[], Tensor], calls_before: bool) -> Step:
    """One step. Theirs wants the centre's gradients to be there when `step` is called; ours computes them itself."""

    def closure() -> Tensor:
        opt.zero_grad()
        return run_pass()

    def step() -> None:
        if calls_before:
            closure()
        opt.step(closure)

    return step


def seconds(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def interleaved(mine: Step, other: Step, repeats: int) -> dict[str, float]:
    for warm_up in (mine, other) * 3:
        warm_up()
    pairs = []
    for i in range(repeats):
        if i % 2:
            second = seconds(other)
            pairs.append((seconds(mine), second))
        else:
            pairs.append((seconds(mine), seconds(other)))
    low, middle, high = statistics.quantiles([a / b for a, b in pairs], n=4)
    return {
        "our_ms": 1e3 * statistics.median(a for a, _ in pairs),
        "their_ms": 1e3 * statistics.median(b for _, b in pairs),
        "ratio": middle,
        "ratio_low_quartile": low,
        "ratio_high_quartile": high,
    }


def measure(workload: str, row: tuple[str, str], batch: int, repeats: int) -> dict[str, dict[str, float]]:
    """Whole steps, and what the optimizers add to their passes."""
    method, variant = row
    torch.manual_seed(0)
    model, inputs = WORKLOADS[workload](batch)
    targets = torch.randint(10, (batch,))
    peer = copy.deepcopy(model)
    foreach, control = variant == "foreach", variant == "control"
    mine = theirs(method, False, model) if control else ours(method, foreach, model)
    other = theirs(method, foreach, peer)
    results = {}
    for part, run_pass, count in (("step", real_pass, repeats), ("alone", ready_gradients, 10 * repeats)):
        first = step_of(mine, functools.partial(run_pass, model, inputs, targets), calls_before=control)
        second = step_of(other, functools.partial(run_pass, peer, inputs, targets), calls_before=True)
        results[part] = interleaved(first, second, count)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=40, help="pairs of steps a row")
    parser.add_argument("--threads", type=int, default=2, help="of torch.set_num_threads")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    setting = {
        "torch": torch.__version__,
        "pytorch_optimizer": importlib.metadata.version("pytorch-optimizer"),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "batch": options.batch,
        "repeats": options.repeats,
    }
    print(", ".join(f"{key} {value}" for key, value in setting.items()))
    head = f"{'workload':<22} {'method':<6} {'theirs':<8} {'what':<6} {'ours ms':>8} {'theirs ms':>9} {'ratio':>6}"
    print(f"{head}  quartiles")
    rows = []
    for workload, row in itertools.product(WORKLOADS, ROWS):
        for what, numbers in measure(workload, row, options.batch, options.repeats).items():
            label = {"workload": workload, "method": row[0], "theirs": row[1], "what": what}
            rows.append(label | numbers)
            print(
                f"{workload:<22} {row[0]:<6} {row[1]:<8} {what:<6} {numbers['our_ms']:8.2f} "
                f"{numbers['their_ms']:9.2f} {numbers['ratio']:6.3f}  "
                f"{numbers['ratio_low_quartile']:.3f} .. {numbers['ratio_high_quartile']:.3f}",
                flush=True,
            )
    if options.json:
        options.json.write_text(
            json.dumps({"command": shlex.join(sys.argv), "setting": setting, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()

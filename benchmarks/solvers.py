"""How far each inner solver brings the relaxed objective in a given number of products with `H`.

    python benchmarks/solvers.py [--batch 32] [--json FILE]

Counts, not times: a refresh costs its products. Every solver starts from the same metric (the identity) on the same
quadratic model of an untrained network; the last column says after how many products it is at or below the objective of
the paper's 50 heavy-ball steps.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from llqr import Inner, Metric
from llqr.curvature import NGD, Curvature, Problem, QuadraticModel, frozen
from llqr.curvature.engines import ENGINES
from llqr.lab import models
from llqr.solve import solve

NETWORKS = {
    "resnet18, width 16": ("resnet18", {"width": 16}),
    "vit-ti, 32 pixels": ("vit-ti", {"image_size": 32, "patch": 8, "depth": 4, "attention": "explicit"}),
}
PRODUCTS = (1, 2, 3, 5, 8, 15, 30, 50)


class Counted:
    """A quadratic model that counts its products."""

    def __init__(self, inner: QuadraticModel) -> None:
        self._inner = inner
        self.loss, self.gradient = inner.loss, inner.gradient
        self.products = 0

    def product(self, v: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.products += 1
        return self._inner.product(v)


def quadratic(model: nn.Module, batch: int) -> Curvature:
    images, labels = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    problem = Problem(model, cross_entropy, (images, labels), dict(model.named_parameters()))
    return Curvature(problem, NGD, ENGINES["forward"])


def curve(model: nn.Module, curvature: Curvature, solver: str) -> dict[int, float]:
    """Products -> objective. The one product that only reads the objective at the end is not counted."""
    objectives = {}
    for products in PRODUCTS:
        counted = Counted(curvature)
        solution = solve(Metric(model, structure="diagonal"), counted, Inner(solver, steps=products))
        objectives[counted.products - 1] = float(solution.after)
    return objectives


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args()
    rows = []
    print(f"{'network':<20} {'solver':<11}" + "".join(f"{n:>11}" for n in PRODUCTS) + "   products to 50 heavy-ball")
    for label, (name, settings) in NETWORKS.items():
        torch.manual_seed(0)
        model = models.build(name, classes=10, **settings)
        with frozen(model, torch.device("cpu")), torch.no_grad():
            curvature = quadratic(model, options.batch)
            curves = {solver: curve(model, curvature, solver) for solver in ("heavy-ball", "adam", "cg")}
        target = curves["heavy-ball"][50]
        for solver, objectives in curves.items():
            reached = next((n for n, value in objectives.items() if value <= target), None)
            rows.append({"network": label, "solver": solver, "objective": objectives, "products_to_target": reached})
            cells = "".join(f"{value:>11.4g}" for value in objectives.values())
            print(f"{label:<20} {solver:<11}{cells}   {reached if reached is not None else 'not in 50'}", flush=True)
    if options.json:
        setting = {"torch": torch.__version__, "batch": options.batch, "structure": "diagonal", "divergence": "ngd"}
        options.json.write_text(
            json.dumps({"command": shlex.join(sys.argv), "setting": setting, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()

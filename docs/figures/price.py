"""CIFAR-100 / ResNet-18: last accuracy against training time, all methods. `python docs/figures/price.py`."""

import json
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from llqr.lab import pictures, plots
from llqr.lab.grouping import grouped
from llqr.lab.results import measurements
from llqr.lab.runs.stored import RunRecord

RESULTS = Path(__file__).parents[2] / "results"
FILES = [RESULTS / "cifar100.jsonl", RESULTS / "price.jsonl"]
RECIPES = ("cifar100/resnet18", "cifar100/resnet18@rho-0.1", "price/resnet18", "price/resnet18@146-epochs")
CADENCE = RESULTS / "bench/cadence-resnet18-side-2304.json"  # runs with other structures than its e-kfac are left out


def label(run: RunRecord) -> str:
    probe, geometry = run.config["run"]["probe"], run.config["run"]["geometry"]
    norm = ", metric norm" if geometry and probe and probe["norm"] == "metric" else ""
    epochs = run.config["run"]["training"]["epochs"]
    length = "" if epochs == 200 else f", {epochs} epochs"
    return f"{run.method}, rho {probe['rho']:g}{norm}{length}" if probe else run.method


@pictures.styled
def draw() -> Figure:
    runs = [run for file in FILES for run in measurements.read_file(file) if run.recipe in RECIPES]
    kept = [run for run in runs if (run.config["run"]["geometry"] or {}).get("structure", "e-kfac") == "e-kfac"]
    cadence = json.loads(CADENCE.read_text())
    figure, (axes,) = pictures.column([3.4])
    for number, (name, seeds) in enumerate(sorted(grouped(kept, label).items(), reverse=True)):
        last = np.array([run.result["last"] for run in seeds])
        steps, epochs = (seeds[0].result[key] for key in ("steps", "epochs"))
        time = plots.time_of_sam(cadence, seeds[0].config["run"], steps) * epochs / steps
        spread = last.std(ddof=1) if len(last) > 1 else 0
        shown = {"fmt": "osD^v<>pX*"[number], "color": pictures.look(number)[0], "markersize": 6}
        axes.errorbar(time, last.mean(), yerr=spread, label=f"{name}: {last.mean():.2f}, n = {len(last)}", **shown)
    axes.set(xlabel="training time, in epochs of SAM", ylabel="last test accuracy, %")
    axes.set_xlim(left=0)
    pictures.legend_above(figure, axes, columns=1)
    pictures.note_below(figure, "mean ± standard deviation over n seeds")
    return figure


if __name__ == "__main__":
    sources = ", ".join(map(pictures.digest, [*FILES, CADENCE]))
    pictures.save(draw(), Path(__file__).with_suffix(".svg"), "CIFAR-100 / ResNet-18: accuracy against time", sources)

"""CIFAR-100 / ResNet-18 by training time: last accuracies, and curves. `python docs/figures/price.py`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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

CURVES = sorted((RESULTS / "curves").glob("cifar100-resnet18@rho-0.1-seed*.jsonl"))


def time_of_sam(run: Mapping[str, Any], steps: Any) -> Any:
    """How long these steps take, in steps of SAM, by a record of `llqr bench cadence`: runs that share a device cannot
    be timed themselves. A step between two probes takes as long as one without a probe."""
    geometry, probe = run["geometry"] or {}, run["probe"]
    rows = json.loads(CADENCE.read_text())["rows"]
    timed = {(row["method"], row["interval"]): row["lasting_vs_sam"]["median"] for row in rows}
    base = "AdamW" if "adam" in run["base"]["name"] else "SGD"
    plain, probed = (
        timed[name, geometry.get("every")] for name in (("LLQR", "LLQR+SAM") if geometry else (base, "SAM"))
    )
    if probe is None:
        return plain * steps
    second = np.maximum(0, steps - (probe.get("start_after") or 0)) / (probe.get("every") or 1)
    return plain * steps + (probed - plain) * second


@pictures.styled
def draw_curves() -> Figure:
    """Test error by epoch, and test loss by time."""
    lines = [line for file in CURVES for line in measurements.read_curves(file)]
    lines = [line for line in lines if line["run"]["method"] in ("sam", "llqr-ngd+sam")]
    figure = plots.draw_curves(lines, ["error:epoch", "test_loss:epoch"])
    error, loss = figure.axes
    runs = [run for own in plots.named(lines).values() for run in own]
    for drawn, run in zip(loss.get_lines(), runs, strict=True):
        steps = np.array(run["step"], dtype=float)
        drawn.set_xdata(time_of_sam(run["run"], steps) * run["epoch"][-1] / run["step"][-1])
    loss.relim()
    loss.autoscale(axis="x")
    loss.set_xlim(left=0)
    error.set_xlabel("epoch")
    loss.set_xlabel("time, in epochs of SAM")
    return figure


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
    figure, (axes,) = pictures.column([3.4])
    for number, (name, seeds) in enumerate(sorted(grouped(kept, label).items(), reverse=True)):
        last = np.array([run.result["last"] for run in seeds])
        steps, epochs = (seeds[0].result[key] for key in ("steps", "epochs"))
        time = time_of_sam(seeds[0].config["run"], steps) * epochs / steps
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
    sources = ", ".join(map(pictures.digest, CURVES))
    title = "cifar100/resnet18@rho-0.1, sam, llqr-ngd+sam"
    pictures.save(draw_curves(), Path(__file__).with_name("cifar100-error-loss.svg"), title, sources)

"""Folders of runs written by hand, with numbers that are easy to check and a task of one's choice."""

import json
import math

from llqr.lab.config import recipe
from llqr.lab.runs.json_files import plain

ACCURACY = {"metric": "accuracy", "larger_is_better": True, "unit": "images", "others": ["loss"]}
BLEU = {"metric": "BLEU", "larger_is_better": True, "unit": "tokens", "others": ["perplexity", "loss"]}
METRIC_METHODS = ("llqr-ngd", "llqr-ngd+sam")


def write_run(root, method, seed, *, best=90.0, name="digits/mlp", task=ACCURACY, epochs=4, finished=True, **changes):
    """One run; ``changes`` replace entries of its files, such as ``result={"epoch_seconds": 2.0}``.

    Without ``epochs`` it is as long as its recipe says, with four evaluations in its log.
    """
    folder = root / name / method / f"seed{seed}"
    folder.mkdir(parents=True)
    length = [] if epochs is None else [f"training.epochs={epochs}"]
    run = plain(recipe.load(name, length).run(method).to_dict())
    epochs = epochs or 4
    made = {
        "started": f"2026-04-01T00:00:{seed:02d}+00:00",
        "command": "llqr compare --data digits --model mlp --data-dir /home/someone/data --out=/scratch/runs",
        "commit": "0123abc",
        "dirty": False,
        "versions": {"llqr": "0.1.0", "torch": "2.13.0", "cuda": None, "python": "3.11.0"},
        "machine": {"device": "cpu", "platform": "Linux", "cpus": 2, "threads": 1},
    }
    config = {"recipe": name, "seed": seed, "run": run} | made | {"resumed": []} | changes.get("config", {})
    (folder / "config.json").write_text(json.dumps(config))
    records = [record(epoch, method, best, task, epochs) for epoch in range(1, (epochs if finished else 2) + 1)]
    (folder / "log.jsonl").write_text("".join(f"{json.dumps(plain(one))}\n" for one in records))
    if finished:
        result = result_of(name, method, seed, best, task, records) | changes.get("result", {})
        (folder / "result.json").write_text(json.dumps(result))
    return folder


def record(epoch, method, best, task, epochs):
    value = best - (epochs - epoch)
    learns = method in METRIC_METHODS
    report = {"step": 10 * epoch, "accepted": epoch != 2, "reason": "", "objective_before": -2.0}
    report |= {"objective_after": math.nan if epoch == 2 else -3.0, "seconds": 0.5, "engine": "forward"}
    report |= {"change": math.nan if epoch == 2 else 0.1 * epoch, "cosine": 1 - 0.1 * epoch}
    return {
        "epoch": epoch,
        "step": 10 * epoch,
        "lr": 0.1,
        "train": {"loss": 1 / epoch},
        "test": {task["metric"]: value} | dict.fromkeys(task["others"], 2 / epoch),
        "seconds": {"train": 1.0, "eval": 0.5, "refresh": 0.5 if learns else 0},
        "rate": 100.0,
        "refreshes": [report] if learns else [],
    }


def result_of(name, method, seed, best, task, records):
    return {
        "recipe": name,
        "title": "Fake <runs>",
        "task": "classification",
        "method": method,
        "seed": seed,
        **{key: task[key] for key in ("metric", "larger_is_better", "unit")},
        "best": best,
        "best_epoch": len(records),
        "last": best,
        "test": records[-1]["test"],
        "epochs": len(records),
        "seconds": {"train": 4.0, "eval": 2.0, "refresh": 1.0, "total": 6.0},
        "epoch_seconds": 1.0,
        "rate": 100.0,
        "metric_bytes": 2**20,
        "refreshes": 1,
        "refreshes_rejected": 0,
    }


def write_analysis(folder, top, perceived, *, samples=64, reason=""):
    pair = {"value": perceived, "error": 0.0, "steps": 3}
    analysis = {
        "samples": samples,
        "loss": 0.1,
        "sharpness": {
            "top": pair | {"value": top},
            "perceived": None if perceived is None else pair,
            "reason": reason,
        },
        "engine": "double-backward",
    }
    (folder / "analysis.json").write_text(json.dumps(analysis))

"""Carry out the protocol "Fine-tuning SST": the choices, the test and the times, several runs at once.

python results/fine-tuning/sst.py --data sst --model minilm --jobs 10 --out results/fine-tuning/sst.jsonl
python results/fine-tuning/sst.py --out results/fine-tuning/sst.jsonl    # only prints the table

A run that is in the file is not made again. Needs what examples/fine_tune_sst.py needs, and scipy for the table.
"""

import argparse
import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[2] / "examples" / "fine_tune_sst.py"
KEY = ("task", "method", "rho", "lr", "seed")
RATES, RADII = (2e-5, 5e-5, 1e-4), (0.005, 0.02, 0.05)
PROBING = ("sam", "llqr+sam", "llqr+sam-every-5")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.data and args.model:
        make_runs(args)
    print_table([json.loads(line) for line in args.out.read_text().splitlines()])


def make_runs(args: argparse.Namespace) -> None:
    def kept() -> dict[tuple[object, ...], float]:
        lines = args.out.read_text().splitlines() if args.out.exists() else []
        return {tuple(row[name] for name in KEY): row["validation"][-1] for row in map(json.loads, lines)}

    def make(run: tuple[object, ...]) -> None:
        options = [word for name, value in zip(KEY, run, strict=True) for word in (f"--{name}", str(value))]
        where = ["--data", str(args.data), "--model", str(args.model), "--out", str(args.out)]
        subprocess.run([sys.executable, str(SCRIPT), *options, *where], check=True)

    def carry_out(runs: list[tuple[object, ...]], jobs: int) -> dict[tuple[object, ...], float]:
        missing = [run for run in runs if run not in kept()]
        with ThreadPoolExecutor(jobs) as pool:
            for number, _ in enumerate(pool.map(make, missing), 1):
                print(f"{number} of {len(missing)} runs", flush=True)
        done = kept()
        return {run: done[run] for run in runs}

    tasks = ("binary", "fine")
    rates = carry_out([(task, "adamw", RADII[0], lr, 100) for task in tasks for lr in RATES], args.jobs)
    lr = {task: max(RATES, key=lambda rate: (rates[task, "adamw", RADII[0], rate, 100], -rate)) for task in tasks}
    print("learning rates", lr, flush=True)
    radii = [(task, method, rho, lr[task], 100) for task in tasks for method in reversed(PROBING) for rho in RADII]
    scores = carry_out(radii, args.jobs)
    chosen = []
    for task in tasks:
        chosen += [(task, method, RADII[0], lr[task]) for method in ("llqr", "adamw")]
        for method in PROBING:
            rho = max(RADII, key=lambda radius: (scores[task, method, radius, lr[task], 100], -radius))
            chosen.append((task, method, rho, lr[task]))
    print("chosen", chosen, flush=True)
    carry_out([(*one, seed) for seed in range(5) for one in chosen], args.jobs)
    carry_out([(*one, 200) for one in chosen if one[0] == "binary"], 1)


def print_table(rows: list[dict[str, Any]]) -> None:
    """Test accuracy of seeds 0 to 4: mean, standard deviation, differences to AdamW and SAM with Welch's p."""
    from scipy.stats import ttest_ind

    for task in ("binary", "fine"):
        print(f"\n| {task} | rho | test accuracy | - adamw | p | - sam | p | time |\n|:--|--:|--:|--:|--:|--:|--:|--:|")
        mine = [row for row in rows if row["task"] == task]
        test = {
            method: [100 * row["test"] for row in mine if row["method"] == method and row["seed"] < 5]
            for method in ("adamw", "sam", "llqr", "llqr+sam", "llqr+sam-every-5")
        }
        seconds = {row["method"]: row["seconds"] for row in mine if row["seed"] == 200}
        for method, found in test.items():
            cells = [f"{statistics.mean(found):.2f} ± {statistics.stdev(found):.2f}"]
            for other in ("adamw", "sam"):
                difference = statistics.mean(found) - statistics.mean(test[other])
                p = ttest_ind(found, test[other], equal_var=False).pvalue
                cells += ["", ""] if method == other else [f"{difference:+.2f}", f"{p:.2g}"]
            cells.append(f"{seconds[method] / seconds['adamw']:.2f}x" if method in seconds else "")
            rho = next(row["rho"] for row in mine if row["method"] == method and row["seed"] == 0)
            print("|", " | ".join([method, str(rho) if method in PROBING else "", *cells]), "|")


if __name__ == "__main__":
    main()

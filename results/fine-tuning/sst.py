"""Carry out the protocols of fine-tuning on SST: the choices, the test and the times, several runs at once.

python results/fine-tuning/sst.py --data sst --model minilm --jobs 10 --out results/fine-tuning/sst.jsonl
python results/fine-tuning/sst.py --out results/fine-tuning/sst.jsonl    # only prints the tables

A run that is in the file is not made again; a table is printed once all its runs are there. Needs what
examples/fine_tune_sst.py needs, and scipy for the tables.
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
RADII = (0.005, 0.02, 0.05)
SEEDS = 5
# Base, learning rates that are tried, methods without and with a probe, tasks.
PROTOCOLS = (
    ("adamw", (2e-5, 5e-5, 1e-4), ("llqr",), ("sam", "llqr+sam", "llqr+sam-every-5"), ("binary", "fine")),
    ("sgd", (0.003, 0.01, 0.03), ("sgd+llqr",), ("sgd+sam", "sgd+llqr+sam"), ("binary",)),
)


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

    for base, rates, plain, probing, tasks in PROTOCOLS:
        scores = carry_out([(task, base, RADII[0], lr, 100) for task in tasks for lr in rates], args.jobs)
        chosen = []
        for task in tasks:
            lr = max(rates, key=lambda rate: (scores[task, base, RADII[0], rate, 100], -rate))
            radii = carry_out([(task, method, rho, lr, 100) for method in probing for rho in RADII], args.jobs)
            chosen += [(task, method, RADII[0], lr) for method in (base, *plain)]
            for method in probing:
                chosen.append((task, method, max(RADII, key=lambda rho: (radii[task, method, rho, lr, 100], -rho)), lr))
        print("chosen", chosen, flush=True)
        carry_out([(*one, seed) for seed in range(SEEDS) for one in chosen], args.jobs)
        carry_out([(*one, 200) for one in chosen if one[0] == "binary"], 1)


def print_table(rows: list[dict[str, Any]]) -> None:
    """Test accuracy of seeds 0 to 4: mean, standard deviation, differences to the base and SAM with Welch's p."""
    from scipy.stats import ttest_ind

    for base, _, plain, probing, tasks in PROTOCOLS:
        for task in tasks:
            mine = [row for row in rows if row["task"] == task]
            test = {
                method: [100 * row["test"] for row in mine if row["method"] == method and row["seed"] < SEEDS]
                for method in (base, probing[0], *plain, *probing[1:])
            }
            if min(map(len, test.values())) < SEEDS:
                continue
            head = f"| {task} | rho | test accuracy | - {base} | p | - {probing[0]} | p | time |"
            print(f"\n{head}\n|:--|--:|--:|--:|--:|--:|--:|--:|")
            seconds = {row["method"]: row["seconds"] for row in mine if row["seed"] == 200}
            for method, found in test.items():
                cells = [f"{statistics.mean(found):.2f} ± {statistics.stdev(found):.2f}"]
                for other in (base, probing[0]):
                    difference = statistics.mean(found) - statistics.mean(test[other])
                    p = ttest_ind(found, test[other], equal_var=False).pvalue
                    cells += ["", ""] if method == other else [f"{difference:+.2f}", f"{p:.2g}"]
                cells.append(f"{seconds[method] / seconds[base]:.2f}x" if method in seconds else "")
                rho = next(row["rho"] for row in mine if row["method"] == method and row["seed"] == 0)
                print("|", " | ".join([method, str(rho) if method in probing else "", *cells]), "|")


if __name__ == "__main__":
    main()

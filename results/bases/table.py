"""Print the tables of sst.jsonl: `python results/bases/table.py`.

First what was chosen by, the last validation accuracy with seeds 0 and 1; then the test, seeds 0 to 4: test accuracy of
the weights that are best on the validation set, and Welch's p of the difference to the base optimizer alone and to the
same method without the metric.
"""

from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev

from llqr.lab.number_table import spread
from llqr.lab.results import measurements
from llqr.lab.results.summary import welch

ALONE = {"sgd": "sgdm", "adamw": "adamw"}
"""The method that is the base optimizer alone."""

found: dict[tuple[str, str], dict[tuple[float, float], list[measurements.RunRecord]]]
found = defaultdict(lambda: defaultdict(list))
for run in measurements.read_file(Path(__file__).with_name("sst.jsonl")):
    config = run.config["run"]
    found[config["base"]["name"], run.method][config["base"]["lr"], (config["probe"] or {}).get("rho", 0)].append(run)

print("| base | method | lr | rho | last validation accuracy | n |\n|:--|:--|--:|--:|--:|--:|")
for (base, method), settings in sorted(found.items()):
    for (lr, rho), runs in sorted(settings.items()):
        last = [run.result["last"] for run in runs if run.result and run.seed < 2]
        cell = spread(mean(last), stdev(last) if len(last) > 1 else None)
        print(f"| {base} | {method} | {lr:g} | {rho or ''} | {cell} | {len(last)} |")

tested = {
    key: (rho, [run.tested for run in runs if run.tested is not None])
    for key, settings in found.items()
    for (_, rho), runs in settings.items()
    if len(runs) == 5
}


def compared(values: list[float], others: list[float]) -> str:
    return "| |" if values is others else f"{mean(values) - mean(others):+.2f} | {welch(values, others):.2g} |"


print("\n| base | method | rho | test accuracy | - base | p | - without metric | p |")
print("|:--|:--|--:|--:|--:|--:|--:|--:|")
for base, alone in ALONE.items():
    for method in (alone, "llqr-ngd", "sam", "llqr-ngd+sam"):
        rho, values = tested[base, method]
        without = tested[base, {"llqr-ngd": alone, "llqr-ngd+sam": "sam"}.get(method, method)][1]
        cells = f"{compared(values, tested[base, alone][1])} {compared(values, without)}"
        print(f"| {base} | {method} | {rho or ''} | {spread(mean(values), stdev(values))} | {cells}")

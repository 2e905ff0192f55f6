"""Print the table of sst.jsonl: `python results/bases/table.py`.

First what was chosen by, the last validation accuracy with seeds 0 and 1; then the test, seeds 0 to 4: test accuracy of
the weights that are best on the validation set, and Welch's p of the metric, without and with a probe.
"""

from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev

from llqr.lab.number_table import spread
from llqr.lab.results import measurements
from llqr.lab.results.summary import welch

WITHOUT = {"llqr-ngd": "", "llqr-ngd+sam": "sam"}
"""By method, the same without the metric; nothing is the base."""

found: dict[tuple[str, str], dict[tuple[float, float | None], list[measurements.RunRecord]]]
found = defaultdict(lambda: defaultdict(list))
for run in measurements.read_file(Path(__file__).with_name("sst.jsonl")):
    config = run.config["run"]
    found[config["base"]["name"], run.method][config["base"]["lr"], (config["probe"] or {}).get("rho")].append(run)

print("| base | method | lr | rho | last validation accuracy | n |\n|:--|:--|--:|--:|--:|--:|")
for (base, method), settings in found.items():
    for (lr, rho), runs in sorted(settings.items()):
        last = [run.result["last"] for run in runs if run.result and run.seed < 2]
        print(f"| {base} | {method} | {lr:g} | {rho or ''} | {spread(mean(last), stdev(last))} | {len(last)} |")

tested = {
    key: (rho, [run.tested for run in runs if run.tested is not None])
    for key, settings in found.items()
    for (_, rho), runs in settings.items()
    if len(runs) == 5
}
print("\n| base | method | rho | test accuracy | n | gain of the metric | p |\n|:--|:--|--:|--:|--:|--:|--:|")
for (base, method), (rho, values) in tested.items():
    cells = [base, method, str(rho or ""), spread(mean(values), stdev(values)), str(len(values)), "", ""]
    if method in WITHOUT:
        other = tested[base, WITHOUT[method] or base][1]
        cells[-2:] = f"{mean(values) - mean(other):+.2f}", f"{welch(values, other):.2g}"
    print("|", " | ".join(cells), "|")

"""Write the kept runs in `results/*.jsonl` and `results/demo/*.jsonl` as today's library reads them.

A setting that the library no longer has is dropped from the configuration of every kept run if all of them had the one
value that today's code always has; otherwise nothing is written and the script fails, because a result would lose its
meaning. A default that changed is written down: a probe without a norm had the Euclidean one. Curves (`results/curves`)
are only drawn, never compared with a recipe: they keep every setting that their run had.
"""

import json
from pathlib import Path

REMOVED = {("geometry", "inner", "gradients"): 1, ("geometry", "runtime", "spread"): False}
EUCLIDEAN = ("sam", "fsam")
FOLDER = Path(__file__).parent


def main() -> None:
    changed = {}
    for path in sorted([*FOLDER.glob("*.jsonl"), *FOLDER.glob("demo/*.jsonl")]):
        lines = [json.loads(text) for text in path.read_text().splitlines()]
        found = [drop(line["run"], place, value) for line in lines if "run" in line for place, value in REMOVED.items()]
        found += [name_norm(line["run"].get("probe")) for line in lines if "run" in line]
        if any(found):
            changed[path] = lines
    for path, lines in changed.items():
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        print(path)


def name_norm(probe: dict | None) -> bool:
    """Write down the norm of a probe that was made when the Euclidean one was the default; whether it was missing."""
    missing = probe is not None and probe["kind"] in EUCLIDEAN and probe.get("norm") is None
    if missing:
        probe["norm"] = "euclidean"
    return missing


def drop(run: dict, place: tuple[str, ...], only: object) -> bool:
    """Remove one setting from a run; whether it was there. Raises if it has another value than the ``only`` one."""
    *outer, name = place
    for key in outer:
        run = run.get(key) or {}
    if name not in run:
        return False
    if run.pop(name) != only:
        raise SystemExit(f"A kept run has another {'.'.join(place)} than {only}.")
    return True


if __name__ == "__main__":
    main()

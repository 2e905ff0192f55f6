"""What the long tests counted: shown at the end of the run, and kept as a file where `LLQR_SOAK_OUT` names a folder."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path

from llqr.lab.runs.provenance import source_state, versions

PROPERTY = "counts"


def show(what, counts, record_property):
    record_property(PROPERTY, f"{what}: " + ", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
    folder = os.environ.get("LLQR_SOAK_OUT")
    if folder is None:
        return
    test = os.environ["PYTEST_CURRENT_TEST"].partition(" ")[0]
    numbers = [f"{name}={os.environ[name]} " for name in ("LLQR_SOAK", "LLQR_KILLS") if name in os.environ]
    record = {
        "what": what,
        "command": f"{''.join(numbers)}LLQR_SOAK_OUT=results/soak python -m pytest -m slow {test}",
        **source_state(),
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "counts": dict(sorted(counts.items())),
    }
    path = Path(folder, what.replace(" ", "-") + ".json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")

"""Files of results: JSON lines, one per run, with everything needed to judge it.

They are the only source of the published tables. A line holds the resolved configuration of a run, its commands with
their commits, versions and machines, its result, and the sharpness of its solution if that was measured before. Paths
on the machine are left out.
"""

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from llqr import STRUCTURES
from llqr.lab import writing
from llqr.lab.errors import ConfigurationError, DataError
from llqr.lab.runs.json_files import CURVE, LINE, checked, content, flatten, plain
from llqr.lab.runs.stored import RunRecord, StoredRun

KIND = "run"
MADE = ("started", "command", "commit", "dirty", "versions", "machine")
"""What is known of every command that worked on a run; the lines from before the commit was recorded lack it."""
ANALYSIS = ("samples", "loss", "sharpness", "engine")
REFRESH_COLUMNS = {f"refresh_{key}": key for key in ("step", "seconds", "change", "cosine")}
REFRESH_COLUMNS |= {key: key for key in ("objective_before", "objective_after")}
"""Columns of a curve with one number per refresh, and what its report calls them."""
ELSEWHERE = "run.data.root"
ABSOLUTE = re.compile(r"""(?:^|(?<==)|(?<==["']))/[^"']*""")


def differences(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """``key = theirs, not ours`` for every setting in which two runs differ; a missing option is one not set."""
    one, other = (dict(flatten({"run": plain(_in_effect(run))})) for run in (theirs, ours))
    unset = {"None", "{}"}
    differing = (key for key in {*one, *other} - {ELSEWHERE} if one.get(key) != other.get(key))
    keys = sorted(key for key in differing if not {str(one.get(key)), str(other.get(key))} <= unset)
    return [f"{key.removeprefix('run.')} = {one.get(key)}, not {other.get(key)}" for key in keys]


def _in_effect(run: dict[str, Any]) -> dict[str, Any]:
    """The run without settings that change nothing.

    Without a metric, the norm of a probe is the Euclidean one. To structures that take any length, such as a diagonal,
    the longest side does not matter.
    """
    probe, geometry = run.get("probe"), run.get("geometry")
    if probe and not geometry and probe.get("kind") in ("sam", "fsam"):
        run = run | {"probe": probe | {"norm": (probe.get("norm") or "euclidean").replace("metric", "euclidean")}}
    if geometry and not _has_sides(geometry.get("structure")):
        runtime = {name: value for name, value in geometry.get("runtime", {}).items() if name != "max_side"}
        run = run | {"geometry": geometry | {"runtime": runtime}}
    return run


def _has_sides(structure: Any) -> bool:
    kinds = structure.values() if isinstance(structure, dict) else [structure]
    return any(kind not in STRUCTURES or STRUCTURES[kind].fallback is not None for kind in kinds)


def line_of(run: StoredRun) -> dict[str, Any]:
    """The line that keeps a finished run: what was asked for, the commands that made it, and what came of it."""
    line = _head(run, KIND) | {"result": run.result}
    if run.analysis is not None:
        line["analysis"] = {key: run.analysis[key] for key in ANALYSIS}
    return dict(plain(line))


def _head(run: StoredRun, kind: str) -> dict[str, Any]:
    data = {key: value for key, value in run.config["run"]["data"].items() if key != "root"}
    line = {"kind": kind, "recipe": run.recipe, "seed": run.seed, "run": run.config["run"] | {"data": data}}
    return line | _command(run.config) | {"resumed": [_command(later) for later in run.config["resumed"]]}


def _command(config: dict[str, Any]) -> dict[str, Any]:
    made = {key: config[key] for key in MADE if key in config}
    return made | {"command": without_places(made["command"])}


def without_places(command: str) -> str:
    """A command with absolute paths reduced to their last part, also after an equals sign."""
    return shlex.join(
        ABSOLUTE.sub(lambda found: PurePosixPath(found.group()).name, word) for word in shlex.split(command)
    )


def add(runs: Sequence[StoredRun], path: Path) -> tuple[int, int]:
    """Append finished runs to a file, and the curves of all to those beside it; how many were new, and how many known.

    A run that is there with another result is refused: only the user can say which of the two is right.
    """
    known_runs = {_identity(known): known for known in (read_file(path) if path.exists() else ())}
    lines = []
    already = 0
    for run in [run for run in runs if run.result is not None]:
        line = line_of(run)
        known = known_runs.get(_identity(run))
        if known is None:
            lines.append(json.dumps(line))
            known_runs[_identity(run)] = run
        elif known.result == line["result"]:
            already += 1
        else:
            raise ConfigurationError(
                f"{known.origin} holds another result of {run.label} than {run.origin}; delete the one that is wrong."
            )
    for run in [run for run in runs if run.records]:
        curves = path.parent / "curves" / f"{run.recipe.replace('/', '-')}-seed{run.seed}.jsonl"
        curve = json.dumps(plain(curve_of(run)))
        if not curves.exists() or curve not in curves.read_text(errors="replace").splitlines():
            _append([curve], curves)
    _append(lines, path)
    return len(lines), already


def _append(lines: Sequence[str], path: Path) -> None:
    """At once, because another command may append, too."""
    if lines:
        writing.make_folder(path.parent)
        ended = not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")  # an editor may leave the last line open
        new = "".join(["" if ended else "\n", *(f"{line}\n" for line in lines)]).encode()
        with writing.explained(path), path.open("ab", buffering=len(new) + 1) as file:
            file.write(new)


def _identity(run: RunRecord) -> str:
    settings: dict[str, Any] = plain(run.settings)
    settings["data"].pop("root", None)
    return json.dumps([run.recipe, run.seed, settings], sort_keys=True)


def read(folder: Path) -> list[RunRecord]:
    """All runs in the ``*.jsonl`` files of a folder; lines of another kind are skipped."""
    return [run for path in sorted(folder.glob("*.jsonl")) for run in read_file(path)]


def read_file(path: Path) -> list[RunRecord]:
    runs = []
    for origin, line in lines_of(path):
        if line["kind"] == KIND:
            checked(line, LINE, origin)
            config = {key: value for key, value in line.items() if key not in ("kind", "result", "analysis")}
            runs.append(RunRecord(config, line["result"], line.get("analysis"), origin))
    return runs


def read_curves(path: Path) -> list[dict[str, Any]]:
    """The kept curves of a file: every evaluation and refresh of a run, by its last line, or its last finished one."""
    curves: dict[str, dict[str, Any]] = {}
    for origin, line in lines_of(path):
        if line["kind"] != "curve":
            raise DataError(f"{origin} is no curve, but a {line['kind']}.")
        checked(line, CURVE, origin)
        key = json.dumps([line["recipe"], line["seed"], line["run"]], sort_keys=True)
        if line["finished"] or not curves.get(key, line)["finished"]:
            curves[key] = line
    return list(curves.values())


def curve_of(run: StoredRun) -> dict[str, Any]:
    """Return the line of a run with its columns: one number per evaluation, then one per refresh."""
    split = "valid" if "valid" in run.records[0] else "test"
    columns = {name: [record[name] for record in run.records] for name in ("epoch", "step")}
    for name in run.records[0][split]:
        columns[f"{split}_loss" if name == "loss" else name] = [record[split][name] for record in run.records]
    columns["train_loss"] = [record["train"]["loss"] for record in run.records]
    columns["train_seconds"] = [record["seconds"]["train"] for record in run.records]
    reports = [report for record in run.records for report in record["refreshes"]]
    for name, key in REFRESH_COLUMNS.items():
        if any(key in report for report in reports):  # runs without a metric have none
            columns[name] = [report.get(key) for report in reports]
    rounded = {name: [float(f"{x:.6g}") if isinstance(x, float) else x for x in own] for name, own in columns.items()}
    return _head(run, "curve") | {"finished": run.result is not None, "split": split} | rounded


def lines_of(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines of a file, whatever their kind, each with its place."""
    for number, text in enumerate(content(path).splitlines(), start=1):
        if not text.strip():
            continue
        origin = f"{path.name}, line {number}"
        try:
            line = json.loads(text)
        except (RecursionError, ValueError) as error:
            raise DataError(f"{origin} is damaged: {error}; delete it and add its run again.") from error
        if not isinstance(line, dict) or "kind" not in line:
            raise DataError(f"{origin} is no result: it has no kind.")
        yield origin, line

"""Where the numbers come from: every run with its files, settings, versions, machines and commands."""

from typing import Any

from llqr.lab.report.section import Part, Section, sources
from llqr.lab.report.tables import EMPTY, Cell, Row, Table, duration, single
from llqr.lab.runs.folder import flatten
from llqr.lab.runs.stored import StoredRun

FILES = ("config.json", "log.jsonl", "result.json", "analysis.json", "checkpoint.pt", "best.pt")


def every_run(section: Section) -> Part:
    """One row a run, with its files."""
    metric = section.finished[0].result["metric"] if section.finished else "metric"
    rows = []
    for method, runs in section.by_method(section.runs):
        rows += [
            Row(_cells(section, run), "" if number else section.rows_of(method)) for number, run in enumerate(runs)
        ]
    headings = [
        "method",
        "seed",
        "state",
        f"best {metric}",
        f"at {section.axis}",
        f"last {metric}",
        "time",
        "per second",
        "files",
    ]
    return Part("Runs", tables=[Table(headings, rows)])


def _cells(section: Section, run: StoredRun) -> list[Cell]:
    log, file = section.link(run, "log.jsonl"), section.link(run, "result.json")
    cells = [Cell(run.method, link=section.link(run)), Cell(str(run.seed), run.seed), Cell(run.state, None, log, log)]
    if run.result is None:
        cells += [EMPTY] * 5
    else:
        numbers = (("seconds", "total"), ("rate",), (f"best_{section.axis}",))
        time, rate, position = (section.result(run, *keys) for keys in numbers)
        cells += [
            single(section.result(run, "best"), file),
            Cell(f"{position.value:,g}", position.value, str(position), file),
            single(section.result(run, "last"), file),
            Cell(duration(time.value), time.value, str(time), file),
            Cell(f"{rate.value:,.0f} {run.result['unit']}", rate.value, str(rate), file),
        ]
    present = [name for name in FILES if (run.path / name).exists()]
    return [*cells, Cell("", files=[(name, section.link(run, name)) for name in present])]


def configuration(section: Section) -> Part:
    """What all methods share, in what they differ, and where and how the runs were made."""
    settings = {run.method: dict(flatten(run.config["run"])) for run in section.runs}
    shared, differing = [], []
    for key in dict.fromkeys(key for own in settings.values() for key in own):
        values = [own.get(key) for own in settings.values()]
        # An option that no method sets, what the columns are named after, and a place that decides nothing.
        if all(value in (None, {}) for value in values) or key in ("method", "data.root"):
            continue
        same = all(value == values[0] for value in values)
        (shared if same else differing).append(Row([Cell(key), *map(_shown, values[:1] if same else values)]))
    commands = [command for run in section.runs for command in (run.config, *run.config["resumed"])]
    made: dict[str, dict[str, None]] = {}
    for command in commands:
        for key, value in flatten({kind: command[kind] for kind in ("versions", "machine")}):
            made.setdefault(key, {})[str(value)] = None
    machines = [Row([Cell(key), Cell(", ".join(values))]) for key, values in made.items()]
    tables = [Table(["setting", *settings], differing)] if differing else []
    folded = [
        ("What all methods share", Table(["setting", "value"], shared)),
        ("Versions and machines", Table(["", "value"], machines)),
    ]
    used = list(dict.fromkeys(command["command"] for command in commands))
    return Part("Configuration", [sources("config.json", section.runs)], tables, folded=folded, listings=used)


def _shown(value: Any) -> Cell:
    return EMPTY if value is None else Cell(str(value), value if isinstance(value, int | float) else None)

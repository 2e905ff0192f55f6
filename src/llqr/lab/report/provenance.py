"""Where the numbers come from: every run with its files, settings, versions, machines and commands."""

from collections.abc import Mapping
from pathlib import Path

from llqr.lab.report.html_table import EMPTY, HtmlCell, HtmlTable, Sourced, duration, plain_cell, single
from llqr.lab.report.refreshes import last_effect
from llqr.lab.report.section import Part, Section, result_of, sources
from llqr.lab.runs.json_files import flatten
from llqr.lab.runs.stored import StoredRun
from llqr.report import percent

FILES = ("config.json", "log.jsonl", "result.json", "analysis.json", "checkpoint.pt", "best.pt")


def every_run(section: Section) -> Part:
    """One row per run, with its files."""
    metric = result_of(section.finished[0])["metric"] if section.finished else "metric"
    effects = {run.path: last_effect(section, run, "change") for run in section.runs}
    shown = effects if any(effects.values()) else {}
    rows = []
    for method, runs in section.by_method(section.runs):
        anchors = [section.rows_of(method), *[""] * (len(runs) - 1)]
        rows += [_cells(section, run, shown, anchor) for run, anchor in zip(runs, anchors, strict=True)]
    headings = ["method", "seed", "state", f"best {metric}", f"at {section.axis}", f"last {metric}", "time"]
    headings += ["per second", *(["change of g"] if shown else []), "files"]
    repeated = [f"Not counted, because another folder has the same run: {run.path}." for run in section.repeated]
    return Part("Runs", repeated, [HtmlTable(headings, rows)])


def _cells(section: Section, run: StoredRun, effects: Mapping[Path, Sourced | None], anchor: str) -> list[HtmlCell]:
    log, file = section.link(run, "log.jsonl"), section.link(run, "result.json")
    cells = [
        HtmlCell(run.method, link=section.link(run), anchor=anchor),
        HtmlCell(str(run.seed), run.seed),
        HtmlCell(run.state, None, log, log),
    ]
    if run.result is None:
        cells += [EMPTY] * 5
    else:
        numbers = (("seconds", "total"), ("rate",), (f"best_{section.axis}",))
        time, rate, position = (section.result(run, *keys) for keys in numbers)
        cells += [
            single(section.result(run, "best"), file),
            HtmlCell(f"{position.value:,g}", position.value, str(position), file),
            single(section.result(run, "last"), file),
            HtmlCell(duration(time.value), time.value, str(time), file),
            HtmlCell(f"{rate.value:,.0f} {run.result['unit']}", rate.value, str(rate), file),
        ]
    if effects:
        effect = effects[run.path]
        cells.append(EMPTY if effect is None else HtmlCell(percent(effect.value), effect.value, str(effect), log))
    present = [name for name in FILES if (run.path / name).exists()]
    return [*cells, HtmlCell("", files=[(name, section.link(run, name)) for name in present])]


def configuration(section: Section) -> Part:
    """The settings that all methods share, those in which they differ, and where and how the runs were made."""
    settings = {run.method: dict(flatten(run.config["run"])) for run in section.runs}
    shared: list[list[HtmlCell]] = []
    differing: list[list[HtmlCell]] = []
    for key in dict.fromkeys(key for own in settings.values() for key in own):
        values = [own.get(key) for own in settings.values()]
        # Left out: options that no method sets, the method (it heads the columns), and where the data lies.
        if all(value in (None, {}) for value in values) or key in ("method", "data.root"):
            continue
        same = all(value == values[0] for value in values)
        (shared if same else differing).append([HtmlCell(key), *map(plain_cell, values[:1] if same else values)])
    commands = [command for run in section.runs for command in (run.config, *run.config["resumed"])]
    made: dict[str, dict[str, None]] = {}
    for command in commands:
        facts = {kind: command[kind] for kind in ("commit", "dirty", "versions", "machine") if kind in command}
        for key, value in flatten(facts):
            made.setdefault(key, {})[str(value)] = None
    machines = [[HtmlCell(key), HtmlCell(", ".join(values))] for key, values in made.items()]
    tables = [HtmlTable(["setting", *settings], differing)] if differing else []
    folded = [
        ("Shared by all methods", HtmlTable(["setting", "value"], shared)),
        ("Source, versions and machines", HtmlTable(["", "value"], machines)),
    ]
    used = list(dict.fromkeys(command["command"] for command in commands))
    return Part("Configuration", [sources("config.json", section.runs)], tables, folded=folded, listings=used)

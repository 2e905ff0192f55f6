"""The parts of a report on the runs of one recipe. Metric names come from the runs, whatever their task is.

The runs are in the order in which their methods are shown; times are compared with those of the first method.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from llqr.lab.errors import ConfigurationError
from llqr.lab.grouping import grouped
from llqr.lab.number_table import spread
from llqr.lab.plots import Curves, ranges
from llqr.lab.results import summary
from llqr.lab.runs.json_files import flatten
from llqr.lab.runs.stored import StoredRun
from llqr.report import WEAK

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NOTHING = "–"
MINUTES = "minutes of training"
ByMethod = Mapping[str, Sequence[StoredRun]]


@dataclass(frozen=True)
class Part:
    """A heading and what stands below it; ``folded`` tables are collapsed until they are clicked."""

    title: str
    sentences: Sequence[str] = ()
    tables: Sequence[pd.DataFrame] = ()
    figures: "Mapping[str, Figure]" = field(default_factory=dict)
    folded: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    listings: Sequence[str] = ()


def conclusion(runs: Sequence[StoredRun]) -> str:
    """The best method, the one it is compared with, n and Welch's p, in one sentence."""
    results = [run.result for run in runs if run.result is not None]
    if not results:
        return "No run is finished yet."
    found = summary.summarise(results)
    order = found.sort_values("last_mean", ascending=not results[0]["larger_is_better"], kind="stable")
    best, *others = order.itertuples()
    said = f"{best.method} ends with the best {best.metric}: {spread(best.last_mean, best.last_std)} (n = {best.n})"
    if not others:
        return f"{said}; it is the only method."
    other = next((one for one in others if one.method == found["method"][0]), others[0])
    p = summary.welch(best.last, other.last)
    chance = "no p" if p is None else f"Welch's p = {p:.2g}"
    return f"{said}, against {spread(other.last_mean, other.last_std)} (n = {other.n}) of {other.method}; {chance}."


def results(runs: Sequence[StoredRun]) -> Part | None:
    """Mean ± standard deviation over seeds, Welch's p against the first method, and times relative to it."""
    finished = grouped((run.result for run in runs if run.result is not None), lambda result: result["method"])
    if not finished:
        return None
    found = summary.summarise(result for own in finished.values() for result in own)
    first = next(found.itertuples())
    result, metric = finished[first.method][0], first.metric
    split, timed = result.get("split", "test"), not any(run.shared_device for run in runs)
    rows = []
    for one in found.itertuples():
        own = finished[one.method]
        row = {"method": one.method, f"last {metric}": spread(one.last_mean, one.last_std)}
        if found["test_mean"].notna().any():
            row[f"test {metric} of the best"] = mean(r.get("test_of_best", {}).get(metric) for r in own)
        row[f"best {metric}"] = spread(one.best_mean, one.best_std)
        for name in (name for name in result[split] if name != metric):
            row[f"last {split} {name.replace('_', ' ')}"] = mean(r[split][name] for r in own)
        row["passes / step"] = _number(own[0].get("passes_per_step"), "{:.2f}")
        p = None if one.method == first.method else summary.welch(one.last, first.last)
        row |= {"n": one.n, f"p against {first.method}": _number(p, "{:.2g}")}
        if timed:
            row[f"s / {one.counted_in}"] = summary.TIMES[one.counted_in][1].format(one.seconds)
            row[f"time / {first.method}"] = f"{one.relative_time:.2f}×"
        rows.append(row)
    better = "larger" if result["larger_is_better"] else "smaller"
    times = "times without evaluation" if timed else "no times, because other programs used the device"
    sentence = f"Mean ± standard deviation over n seeds; a {better} {metric} is better; {times}."
    facts = dict.fromkeys(f"{metric}: {r['bleu']}." for own in finished.values() for r in own if "bleu" in r)
    return Part("Results", [sentence, *facts], [pd.DataFrame(rows)])


def curves(runs: Sequence[StoredRun], methods: Sequence[str]) -> Part | None:
    """What was measured during training by the position in the run; metrics also by time, if no device was shared."""
    logged = grouped((run for run in runs if run.records), lambda run: run.method)
    records = [run.records[0] for own in logged.values() for run in own]
    if not records:
        return None
    kinds = {(split, *record[split]) for record in records for split in ("valid", "test") if split in record}
    if len(kinds) > 1:
        found = " and ".join(sorted(f"{split} {metric}" for split, metric, *_ in kinds))
        raise ConfigurationError(f"RUNS: those of {runs[0].recipe} were evaluated by {found}; report on them apart.")
    ((split, *metrics),) = kinds
    axes = [_axis(runs)] if any(run.shared_device for run in runs) else [_axis(runs), MINUTES]
    wanted = [(split, name, axis) for name in metrics for axis in axes]
    wanted += [("train", name, _axis(runs)) for name in records[0]["train"]]
    figures = {}
    for kind, name, axis in wanted:
        lines = _lines(logged, kind, name, axis)
        shown = name.replace("_", " ")
        title = f"{kind} {shown} over time" if axis == MINUTES else f"{kind} {shown}"
        figures[title] = ranges(title, axis, shown, methods, lines, late=True)
    sentence = "Mean over seeds with their range; the first quarter may be cut off."
    return Part("Curves", [sentence], figures=figures)


def _lines(logged: ByMethod, kind: str, name: str, axis: str) -> Curves:
    """A number of every record, as far as all runs of a method have come, against epochs, steps or time."""
    found = {}
    for method, own in logged.items():
        records = list(zip(*(run.records for run in own), strict=False))
        if axis == MINUTES:
            at = list(accumulate(np.mean([one["seconds"]["train"] for one in several]) / 60 for several in records))
        else:
            at = [first[axis] for first, *_ in records]
        found[method] = at, [[record[kind][name] for record in run] for run in zip(*records, strict=True)]
    return found


def solutions(runs: Sequence[StoredRun], notes: Mapping[Path, str]) -> Part | None:
    """The sharpness of the solutions."""
    missing = [f"Not measured: {note}" for note in dict.fromkeys(notes[run.path] for run in runs if run.path in notes)]
    measured = [(run.method, run.analysis) for run in runs if run.analysis is not None]
    if not measured:
        return Part("Solutions", missing) if missing else None
    rows: list[dict[str, Any]] = []
    for method, pairs in grouped(measured, lambda pair: pair[0]).items():
        found = [analysis for _, analysis in pairs]
        sharpness = [one["sharpness"] for one in found]
        row = {"method": method, "top eigenvalue": mean(one["top"]["value"] for one in sharpness)}
        perceived = [one["perceived"]["value"] for one in sharpness if one.get("perceived")]
        row["perceived"] = mean(perceived)
        if 0 < len(perceived) < len(found):  # U of the others is not positive
            row["perceived"] += f" (n = {len(perceived)})"
        rows.append(row | {"loss": mean(one["loss"] for one in found), "n": len(found)})
    samples = " or ".join(dict.fromkeys(str(analysis["samples"]) for _, analysis in measured))
    sentence = (
        f"The top eigenvalue of the Hessian H of the mean loss on {samples} training samples, by "
        "Lanczos; perceived is that of √U H √U, with U = I where no metric is learned."
    )
    return Part("Solutions", [sentence, *missing], [pd.DataFrame(rows)])


def refreshes(runs: Sequence[StoredRun], methods: Sequence[str]) -> Part | None:
    """One row per method that learns a metric, and what every refresh does to a gradient and to the objective."""
    learned = grouped((run for run in runs if any(one["refreshes"] for one in run.records)), lambda run: run.method)
    listed = [(run, one) for own in learned.values() for run in own for one in run.records]
    if not listed:
        return None
    made = [{"method": run.method, "run": run.path} | one for run, record in listed for one in record["refreshes"]]
    numbers = ("objective_before", "objective_after", "change", "cosine")
    reports = pd.DataFrame(made).astype(dict.fromkeys(numbers, float))
    before = reports["objective_before"]
    reports["of J"] = 100 * (reports["objective_after"] - before) / before.abs().replace(0, np.nan)
    reports["change"] = 100 * reports["change"].where(reports["accepted"].astype(bool))
    rows = []
    for method, own in learned.items():
        found = reports[reports["method"] == method]
        ends = found.dropna(subset="change").groupby("run")[["change", "cosine"]].last().mean()
        weak = " (nearly nothing)" if ends["change"] < 100 * WEAK else ""
        spent = pd.DataFrame(record["seconds"] for run in own for record in run.records).sum()
        sizes = pd.Series([run.result["metric_bytes"] / 2**20 for run in own if run.result is not None], dtype=float)
        rows.append(
            {
                "method": method,
                "refreshes": f"{len(found) / len(own):g}",
                "rejected": f"{(~found['accepted'].astype(bool)).sum() / len(own):g}",
                "seconds each": f"{found['seconds'].mean():.3f}",
                "of the time": f"{100 * spent['refresh'] / spent['train']:.1f} %",
                "change of J": _number(found["of J"].median(), "{:.2f} %"),
                "change of g": _number(ends["change"], "{:.2g} %") + weak,
                "cos(g, Ug)": _number(ends["cosine"], "{:.3f}"),
                "engine": ", ".join(found["engine"].unique()),
                "MiB of U": _number(sizes.mean(), "{:,.2f}"),
            }
        )
    effect, change = "Change of a gradient by U, |Ug − g| / |g| in %", "Change of J by a refresh, in % of its size"
    figures = {title: _by_step(reports, column) for title, column in ((effect, "change"), (change, "of J"))}
    drawn = {title: ranges(title, "step", "%", methods, lines) for title, lines in figures.items() if lines}
    sentence = (
        "Refreshes of a run, on average. J is the objective of a refresh; the change of g is |Ug − g| / |g| after the "
        "last accepted refresh."
    )
    return Part("Refreshes of the metric", [sentence], [pd.DataFrame(rows)], drawn)


def _by_step(reports: pd.DataFrame, column: str) -> Curves:
    """A number of every refresh, at the steps at which every run of a method has it."""
    found = {}
    for method, own in reports.groupby("method", sort=False):
        table = own.pivot(index="step", columns="run", values=column).dropna()
        if not table.empty:
            found[str(method)] = table.index.to_list(), table.T.to_numpy().tolist()
    return found


def every_run(runs: Sequence[StoredRun], repeated: Sequence[StoredRun], home: Path) -> Part:
    """One row per run, with its folder."""
    axis, rows = _axis(runs), []
    for run in runs:
        row = {"method": run.method, "seed": run.seed, "state": run.state}
        if run.result is not None:
            metric, minutes = run.result["metric"], run.result["seconds"]["total"] / 60
            row |= {f"best {metric}": spread(run.result["best"]), f"at {axis}": run.result.get(f"best_{axis}")}
            row |= {f"last {metric}": spread(run.result["last"]), "minutes": f"{minutes:.1f}"}
            row["per second"] = f"{run.result['rate']:,.0f} {run.result['unit']}"
        rows.append(row | {"folder": Path(os.path.relpath(run.path, home)).as_posix()})
    sentences = [f"Not counted, because another folder has the same run: {run.path}." for run in repeated]
    return Part("Runs", sentences, [pd.DataFrame(rows).astype(object).fillna(NOTHING)])


def configuration(runs: Sequence[StoredRun]) -> Part:
    """The settings that all methods share, those in which they differ, and where and how the runs were made."""
    # Left out: options that no method sets, the method (it heads the columns), and where the data lies.
    settings = pd.DataFrame({run.method: _texts(run.config["run"]) for run in runs}).fillna(NOTHING)
    unset = settings.isin([NOTHING, "None", "{}"]).all(axis=1) | settings.index.isin(["method", "data.root"])
    settings = settings[~unset].rename_axis("setting").reset_index()
    same = settings.iloc[:, 1:].nunique(axis=1) == 1
    commands = [command for run in runs for command in (run.config, *run.config["resumed"])]
    kinds = ("commit", "dirty", "versions", "machine")
    made = pd.DataFrame(_texts({kind: command[kind] for kind in kinds if kind in command}) for command in commands)
    values = [(key, ", ".join(dict.fromkeys(made[key].dropna()))) for key in made]
    folded = {
        "Shared by all methods": settings[same].iloc[:, :2].set_axis(["setting", "value"], axis=1),
        "Source, versions and machines": pd.DataFrame(values, columns=["", "value"]),
    }
    used = list(dict.fromkeys(command["command"] for command in commands))
    return Part("Configuration", tables=[] if same.all() else [settings[~same]], folded=folded, listings=used)


def mean(values: Iterable[float | None]) -> str:
    """Mean ± sample standard deviation of all runs; a number that is not finite, which JSON holds as null, is said."""
    series = pd.Series(list(values), dtype=float)
    if series.empty:
        return NOTHING
    return spread(series.mean(), series.std()) if np.isfinite(series).all() else "not finite"


def _number(value: float | None, form: str) -> str:
    return NOTHING if pd.isna(value) else form.format(value)


def _texts(table: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in flatten(table)}


def _axis(runs: Sequence[StoredRun]) -> str:
    return "step" if any(run.counted_in == "step" for run in runs) else "epoch"

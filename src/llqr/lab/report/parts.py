"""The parts of a report on the runs of one recipe. Metric names come from the runs, whatever their task is.

The runs are in the order in which their methods are shown; times are compared with those of the first method.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

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
MIB = 2**20


class Link(str):
    """A cell that is HTML already."""

    __slots__ = ()


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
    order = found.sort_values("best_mean", ascending=not results[0]["larger_is_better"], kind="stable")
    best, *others = order.itertuples()
    said = f"{best.method} has the best {best.metric}: {spread(best.best_mean, best.best_std)} (n = {best.n})"
    if not others:
        return f"{said}; it is the only method."
    other = next((one for one in others if one.method == found["method"][0]), others[0])
    p = summary.welch(best.best, other.best)
    chance = "no p" if p is None else f"Welch's p = {p:.2g}"
    return f"{said}, against {spread(other.best_mean, other.best_std)} (n = {other.n}) of {other.method}; {chance}."


def results(runs: Sequence[StoredRun]) -> Part | None:
    """Mean ± standard deviation over seeds, times relative to the first method, and Welch's p against it."""
    finished = grouped((run.result for run in runs if run.result is not None), lambda result: result["method"])
    if not finished:
        return None
    found = summary.summarise(result for own in finished.values() for result in own)
    first = next(found.itertuples())
    result = finished[first.method][0]
    split, metric = result.get("split", "test"), first.metric
    rows = []
    for one in found.itertuples():
        own = finished[one.method]
        row = {"method": one.method, f"best {metric}": spread(one.best_mean, one.best_std)}
        if found["test_mean"].notna().any():
            row[f"test {metric} of the best"] = mean([r.get("test_of_best", {}).get(metric) for r in own])
        row[f"last {metric}"] = spread(one.last_mean, one.last_std)
        for name in (name for name in result[split] if name != metric):
            row[f"last {split} {name.replace('_', ' ')}"] = mean([r[split][name] for r in own])
        p = None if one.method == first.method else summary.welch(one.best, first.best)
        row |= {"n": one.n, f"p against {first.method}": NOTHING if p is None else f"{p:.2g}"}
        row[f"s / {one.counted_in}"] = summary.TIMES[one.counted_in][1].format(one.seconds)
        row[f"time / {first.method}"] = f"{one.relative_time:.2f}×"
        probing = [r["probing_step_seconds"] for r in own if r.get("probing_step_seconds")]
        row["while probing"] = f"{np.median(probing) / first.seconds:.2f}×" if probing else NOTHING
        rows.append(row)
    frame = pd.DataFrame(rows)
    frame = frame.drop(columns=[name for name in frame if (frame[name] == NOTHING).all()])
    better = "larger" if result["larger_is_better"] else "smaller"
    sentence = f"Mean ± standard deviation over n seeds; a {better} {metric} is better; times without evaluation."
    facts = dict.fromkeys(f"{metric}: {r['bleu']}." for own in finished.values() for r in own if "bleu" in r)
    return Part("Results", [sentence, *facts], [frame])


def curves(runs: Sequence[StoredRun], methods: Sequence[str]) -> Part | None:
    """Everything measured during training: against the position in the run, and the metrics also against time."""
    logged = grouped((run for run in runs if run.records), lambda run: run.method)
    records = [run.records[0] for own in logged.values() for run in own]
    if not records:
        return None
    kinds = {(split, *record[split]) for record in records for split in ("valid", "test") if split in record}
    if len(kinds) > 1:
        found = " and ".join(sorted(f"{split} {metric}" for split, metric, *_ in kinds))
        raise ConfigurationError(f"RUNS: those of {runs[0].recipe} were evaluated by {found}; report on them apart.")
    ((split, *metrics),) = kinds
    axis = _axis(runs)
    wanted = [(split, name, timed) for name in metrics for timed in (False, True)]
    wanted += [("train", name, False) for name in records[0]["train"]]
    figures = {}
    for kind, name, timed in wanted:
        lines: dict[str, Any] = {}
        for method, own in logged.items():
            count = min(len(run.records) for run in own)
            times = [list(accumulate(record["seconds"]["train"] for record in run.records[:count])) for run in own]
            at = np.mean(times, axis=0) / 60 if timed else [record[axis] for record in own[0].records[:count]]
            lines[method] = at, [[record[kind][name] for record in run.records[:count]] for run in own]
        shown = name.replace("_", " ")
        title = f"{kind} {shown} over time" if timed else f"{kind} {shown}"
        figures[title] = ranges(title, "minutes" if timed else axis, shown, methods, [lines], late=True)
    sentence = "Mean over seeds with their range; the first quarter may be cut off; time is training time."
    return Part("Curves", [sentence], figures=figures)


def solutions(runs: Sequence[StoredRun], methods: Sequence[str], notes: Mapping[Path, str]) -> Part | None:
    """The sharpness of the solutions, and the loss along lines through them."""
    missing = [f"Not measured: {note}" for note in dict.fromkeys(notes[run.path] for run in runs if run.path in notes)]
    measured = grouped((run for run in runs if run.analysis is not None), lambda run: run.method)
    if not measured:
        return Part("Solutions", missing) if missing else None
    rows, along, random = [], {}, {}
    for method, own in measured.items():
        found = [run.analysis for run in own if run.analysis is not None]
        perceived = [one["sharpness"]["perceived"]["value"] for one in found if one["sharpness"].get("perceived")]
        row = {"method": method, "top eigenvalue": mean([one["sharpness"]["top"]["value"] for one in found])}
        row |= {"perceived": mean(perceived), "loss": mean([one["loss"] for one in found]), "n": len(found)}
        rows.append(row)
        for lines, is_random in ((along, False), (random, True)):
            of = [_slices(one["slices"], is_random) for one in found]
            lines[method] = of[0][0], [losses for _, losses in of]
    first = next(iter(measured.values()))[0].analysis or {}
    sentence = (
        f"The top eigenvalue of the Hessian H of the mean loss on {first['samples']} training samples, by Lanczos; "
        "perceived is that of √U H √U, with U = I where no metric is learned."
    )
    titles = "Along the top eigenvector of H", "Along random filter-normalised directions"
    figures = {
        titles[0]: ranges(titles[0], "distance from the solution", "loss", methods, [along]),
        titles[1]: ranges(titles[1], "norms of the filters", "loss", methods, [random]),
    }
    return Part("Solutions", [sentence, *missing], [pd.DataFrame(rows)], figures)


def _slices(lines: Iterable[Mapping[str, Any]], is_random: bool) -> tuple[Sequence[float], Sequence[float]]:
    """Positions and losses of a run's slices of one kind, averaged where there are several."""
    chosen = [line for line in lines if line["direction"].startswith("random") == is_random]
    losses = np.array([line["losses"] for line in chosen], dtype=float)  # a loss that is not finite is null, here NaN
    return chosen[0]["positions"], losses.mean(axis=0).tolist()


def refreshes(runs: Sequence[StoredRun], methods: Sequence[str]) -> Part | None:
    """One row per method that learns a metric, the objective of every refresh, and the metric over the run."""
    learned = [run for run in runs if any(record["refreshes"] for record in run.records)]
    if not learned:
        return None
    reports = pd.DataFrame(
        {"method": run.method, "run": run.path, **report}
        for run in learned
        for record in run.records
        for report in record["refreshes"]
    ).reindex(columns=["method", "run", *KEYS])
    reports = reports.astype(dict.fromkeys(("objective_before", "objective_after", "change", "cosine"), float))
    before = reports["objective_before"]
    reports["of J"] = 100 * (reports["objective_after"] - before) / before.abs().replace(0, np.nan)
    accepted = reports[reports["accepted"].astype(bool)]
    rows = []
    for method, own in grouped(learned, lambda run: run.method).items():
        found, last = (frame[frame["method"] == method] for frame in (reports, accepted))
        ends = last.dropna(subset="change").groupby("run")[["change", "cosine"]].last().mean()
        weak = " (nearly nothing)" if ends["change"] < WEAK else ""
        seconds = [[record["seconds"][part] for run in own for record in run.records] for part in ("refresh", "train")]
        sizes = [run.result["metric_bytes"] / MIB for run in own if run.result is not None]
        spectra = pd.DataFrame(run.records[-1]["spectrum"] for run in own)
        rows.append(
            {
                "method": method,
                "refreshes": f"{len(found) / len(own):g}",
                "rejected": len(found) - len(last),
                "seconds each": f"{found['seconds'].mean():.3f}",
                "of the time": f"{100 * sum(seconds[0]) / sum(seconds[1]):.1f} %",
                "change of J": _number(found["of J"].median(), "{:.2f} %"),
                "change of g": _number(100 * ends["change"], "{:.2g} %") + weak,
                "cos(g, Ug)": _number(ends["cosine"], "{:.3f}"),
                "engine": ", ".join(found["engine"].unique()),
                **{f"{key} U": f"{spectra[key].mean():.4f}" for key in ("min", "median", "max")},
                "MiB of U": _number(np.mean(sizes) if sizes else None, "{:,.2f}"),
            }
        )
    axis = _axis(runs)
    spectrum: list[Curves] = []
    for key in ("min", "max"):
        spectrum.append({})
        for method, own in grouped(learned, lambda run: run.method).items():
            count = min(len(run.records) for run in own)
            several = [[record["spectrum"][key] for record in run.records[:count]] for run in own]
            spectrum[-1] |= {method: ([record[axis] for record in own[0].records[:count]], several)}
    effect, change = "Change of a gradient by U, |Ug − g| / |g| in %", "Change of J by a refresh, in % of its size"
    label = "Lowest and highest mean eigenvalue of U among layers"
    changes = _by_step(accepted.assign(change=100 * accepted["change"]), "change")
    figures = {effect: ranges(effect, "step", "%", methods, [changes])} if changes else {}
    figures |= {
        change: ranges(change, "step", "%", methods, [_by_step(reports, "of J")]),
        label: ranges(label, axis, "mean eigenvalue", methods, spectrum),
    }
    sentence = (
        "J is the objective of a refresh, the change of g is |Ug − g| / |g| after the last accepted refresh, and U is "
        "given by the mean eigenvalue of a layer, trace(U) / n."
    )
    return Part("Refreshes of the metric", [sentence], [pd.DataFrame(rows)], figures)


KEYS = ("step", "accepted", "seconds", "engine", "objective_before", "objective_after", "change", "cosine")
"""What is shown of the report of a refresh; older runs lack some of it."""


def _by_step(reports: pd.DataFrame, column: str) -> Curves:
    """A number of every refresh, at the steps at which every run of a method has it."""
    found = {}
    for method, own in reports.groupby("method", sort=False):
        table = own.pivot(index="step", columns="run", values=column).dropna()
        if not table.empty:
            found[str(method)] = table.index.to_list(), table.T.to_numpy().tolist()
    return found


def every_run(runs: Sequence[StoredRun], repeated: Sequence[StoredRun], home: Path) -> Part:
    """One row per run, with a link to its folder."""
    axis, rows = _axis(runs), []
    for run in runs:
        # Quoted: a name may look like an address.
        place = quote(Path(os.path.relpath(run.path, home)).as_posix(), safe="/+@=,")
        row = {"method": Link(f'<a href="{place}">{escape(run.method)}</a>'), "seed": run.seed, "state": run.state}
        if run.result is not None:
            result, minutes = run.result, run.result["seconds"]["total"] / 60
            row |= {f"best {result['metric']}": spread(result["best"]), f"at {axis}": result.get(f"best_{axis}")}
            row |= {f"last {result['metric']}": spread(result["last"]), "minutes": f"{minutes:.1f}"}
            row["per second"] = f"{result['rate']:,.0f} {result['unit']}"
        rows.append(row)
    sentences = [f"Not counted, because another folder has the same run: {run.path}." for run in repeated]
    return Part("Runs", sentences, [pd.DataFrame(rows).astype(object).fillna(NOTHING)])


def configuration(runs: Sequence[StoredRun]) -> Part:
    """The settings that all methods share, those in which they differ, and where and how the runs were made."""
    # Left out: options that no method sets, the method (it heads the columns), and where the data lies.
    settings = pd.DataFrame({run.method: _texts(run.config["run"]) for run in runs}).fillna(NOTHING)
    unset = settings.isin([NOTHING, "None", "{}"]).all(axis=1) | settings.index.isin(["method", "data.root"])
    settings = settings[~unset]
    same = settings.eq(settings.iloc[:, 0], axis=0).all(axis=1)
    commands = [command for run in runs for command in (run.config, *run.config["resumed"])]
    kinds = ("commit", "dirty", "versions", "machine")
    made = pd.DataFrame(_texts({kind: command[kind] for kind in kinds if kind in command}) for command in commands)
    values = {key: ", ".join(dict.fromkeys(made[key].dropna())) for key in made}
    settings = settings.rename_axis("setting").reset_index()
    folded = {
        "Shared by all methods": settings[same.to_numpy()].iloc[:, :2].set_axis(["setting", "value"], axis=1),
        "Source, versions and machines": pd.DataFrame({"": list(values), "value": list(values.values())}),
    }
    tables = [] if same.all() else [settings[~same.to_numpy()]]
    used = list(dict.fromkeys(command["command"] for command in commands))
    return Part("Configuration", tables=tables, folded=folded, listings=used)


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

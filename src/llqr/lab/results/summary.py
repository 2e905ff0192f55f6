"""Statistics over seeds: the methods of a comparison side by side, and Welch's test between two of them."""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd
from rich.box import SIMPLE
from rich.table import Column, Table

from llqr.lab.number_table import spread

TIMES = {"epoch": ("epoch_seconds", "{:.3f}"), "step": ("step_seconds", "{:.5f}")}
"""The time shown for a run that counts in epochs or in steps, and its format in seconds."""

COLUMNS = ("recipe", "method", "metric", "counted_in", "best", "last", "test", "seconds")

FEWEST_SEEDS = 3
"""With two seeds, a p says more about two deviations that happen to be small than about the methods."""


def welch(one: Sequence[float], other: Sequence[float]) -> float | None:
    """The two-sided p of equal means, by Welch's test on the seeds of two methods.

    None with fewer than three seeds, or if no seed differs from another.
    """
    if min(len(one), len(other)) < FEWEST_SEEDS or (len(set(one)) == 1 and len(set(other)) == 1):
        return None
    from scipy.stats import ttest_ind

    with warnings.catch_warnings(action="ignore"):  # of the precision, where the seeds of one are equal
        return float(ttest_ind(one, other, equal_var=False).pvalue)


def summarise(results: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """One row per recipe and method, in the order in which these first appear; a missing number is NaN.

    ``last`` has the values of the seeds, ``last_mean`` and ``last_std`` their statistics, as of ``best`` and, where the
    best weights were tested, ``test``. ``seconds`` is the median time of an epoch, or of a step if the runs count
    steps, and ``relative_time`` that time over the first method's.
    """
    rows = []
    for result in results:
        unit = result.get("counted_in", "epoch")
        tested = result.get("test_of_best", {}).get(result["metric"])
        numbers = {"best": result["best"], "last": result["last"], "test": tested, "seconds": result[TIMES[unit][0]]}
        rows.append({key: result[key] for key in ("recipe", "method", "metric")} | {"counted_in": unit} | numbers)
    frame = pd.DataFrame(rows, columns=COLUMNS).astype({"test": float})
    groups = frame.groupby(["recipe", "method"], sort=False)
    first = {key: (key, "first") for key in ("metric", "counted_in")}
    spreads = {f"{key}_{of}": (key, of) for key in ("last", "best", "test") for of in ("mean", "std")}
    samples = {"n": ("last", "size"), "last": ("last", list), "seconds": ("seconds", "median")}
    found = groups.agg(**first, **samples, **spreads).reset_index()
    found["relative_time"] = found["seconds"] / found.groupby("recipe")["seconds"].transform("first")
    return found


def choices(results: Sequence[dict[str, Any]], seeds: int) -> list[str]:
    """For every method, which of the settings named by ``recipe`` ends with the best metric, in one sentence each.

    A setting without the results of all ``seeds`` is left out.
    """
    sentences = []
    found = summarise(results)
    for method, own in found[found["n"] == seeds].groupby("method", sort=False):
        order = own.sort_values("last_mean", ascending=not results[0]["larger_is_better"], kind="stable")
        best = next(order.itertuples())
        said = f"{method}: of {len(own)}, {best.recipe} has the best last validation {best.metric}"
        sentences.append(f"{said}, {spread(best.last_mean, best.last_std)} (n = {best.n}).")
    return sentences


def as_table(found: pd.DataFrame, timed: bool = True) -> Table:
    """The rows of one recipe for a terminal; ± is the sample standard deviation over seeds."""
    first = next(found.itertuples())
    shown = {"last": f"last {first.metric}", "best": f"best {first.metric}", "test": f"test {first.metric} of the best"}
    if found["test_mean"].isna().all():
        del shown["test"]
    headings = [*shown.values(), "n", *([f"s / {first.counted_in}", f"time / {first.method}"] if timed else ())]
    table = Table("method", *(Column(text, justify="right") for text in headings), title=first.recipe, box=SIMPLE)
    for _, row in found.iterrows():
        means = [spread(row[f"{key}_mean"], row[f"{key}_std"]) for key in shown]
        times = [TIMES[row["counted_in"]][1].format(row["seconds"]), f"{row['relative_time']:.2f}x"]
        table.add_row(row["method"], *means, str(row["n"]), *(times if timed else ()))
    return table

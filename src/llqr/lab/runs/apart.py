"""Runs of one method that differ in more than their seed, and what tells them apart."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llqr.lab.errors import ConfigurationError
from llqr.lab.grouping import grouped
from llqr.lab.runs.json_files import flatten, plain
from llqr.lab.runs.stored import StoredRun

IDENTITY = ("data.root", "method")
"""Settings in which runs of the same kind may differ."""


def settings_apart(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each of these configurations, the settings in which they differ, as ``key=value``; empty if in none."""
    settings = [dict(flatten(plain(run))) for run in runs]
    keys = dict.fromkeys(key for own in settings for key in own if key not in IDENTITY)
    differing = [key for key in keys if len({str(own.get(key)) for own in settings}) > 1]
    return [", ".join(f"{key.removeprefix('task.options.')}={own.get(key)}" for key in differing) for own in settings]


def told_apart(runs: Sequence[StoredRun]) -> tuple[list[StoredRun], list[StoredRun]]:
    """The runs with methods that name what tells them apart, so that only seeds are averaged; and those left out.

    Of a run that several folders hold, one counts: a seed that counts twice makes a deviation too small.
    """
    texts = {
        recipe: {run.text for run in own if run.text is not None}
        for recipe, own in grouped(runs, lambda run: run.recipe).items()
    }
    names: dict[Path, str] = {}
    counted: dict[tuple[str, str, int], StoredRun] = {}
    for (recipe, method), own in grouped(runs, lambda run: (run.recipe, run.method)).items():
        for run, setting in zip(own, settings_apart([_known(run) for run in own]), strict=True):
            # Two methods on two texts differ in more than the method, which their settings do not show.
            text = f"text={run.text or 'unknown'}" if len(texts[recipe]) > 1 else ""
            names[run.path] = ", ".join(part for part in (method, setting, text) if part)
            place = (recipe, names[run.path], run.seed)
            if place not in counted or (counted[place].result is None and run.result is not None):
                counted[place] = run
    kept = {run.path for run in counted.values()}
    return (
        [run.renamed(names[run.path]) for run in runs if run.path in kept],
        [run for run in runs if run.path not in kept],
    )


def _known(run: StoredRun) -> dict[str, Any]:
    """The settings with today's defaults for options that are newer than the run, where they can still be read."""
    try:
        return run.run.to_dict()
    except ConfigurationError:
        settings: dict[str, Any] = run.config["run"]
        return settings

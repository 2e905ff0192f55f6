"""`llqr.lab.compare`: methods on your own model and data, from a program or a notebook."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
import torch
from torch import nn

from llqr.lab import machine
from llqr.lab.analysis import solution
from llqr.lab.analysis.solution import Analyst
from llqr.lab.config.recipe import Recipe, full_name
from llqr.lab.errors import ConfigurationError, Diverged, Stopped
from llqr.lab.own import experiment as experiments
from llqr.lab.own import is_file
from llqr.lab.own import recipe as recipes
from llqr.lab.own.experiment import Experiment
from llqr.lab.progress import Display
from llqr.lab.results.summary import summarise, welch
from llqr.lab.runs import stored
from llqr.lab.runs.folder import RunFolder
from llqr.lab.runs.json_files import plain
from llqr.lab.runs.planned import plan
from llqr.lab.runs.stored import StoredRun
from llqr.lab.stop import Stop
from llqr.lab.training.carry_out import carry_out
from llqr.lab.training.loop import Execution

FORMAT: dict[str, Any] = {"index": False, "na_rep": "", "float_format": "{:.4g}".format}


@dataclass(frozen=True)
class Comparison:
    """Finished runs of several methods; in a notebook and in `print` it is their table.

    Attributes:
        runs: every run, with its configuration, log, result and folder.
        folder: where their folders are.
    """

    runs: Sequence[StoredRun]
    folder: Path
    device: torch.device

    def rows(self) -> list[dict[str, Any]]:
        """Return the table as plain numbers, for `pandas.DataFrame` and the like."""
        summaries = summarise(run.result for run in self.runs if run.result is not None)
        first = next(summaries.itertuples())
        found = []
        for one in summaries.itertuples():
            measured = (run.analysis for run in self.runs if run.method == one.method and run.analysis is not None)
            sharpness = [analysis["sharpness"]["top"]["value"] for analysis in measured]
            other = one.method != first.method
            found.append(
                {
                    "method": one.method,
                    f"last {one.metric}": one.last_mean,
                    "std": one.last_std if one.n > 1 else None,
                    f"best {one.metric}": one.best_mean,
                    "n": one.n,
                    f"- {first.method}": one.last_mean - first.last_mean if other else None,
                    "p": welch(one.last, first.last) if other else None,
                    "top eigenvalue": fmean(sharpness) if sharpness else None,
                    f"s / {one.counted_in}": one.seconds,
                    f"time / {first.method}": one.relative_time,
                }
            )
        return found

    def model(self, method: str, seed: int = 0) -> nn.Module:
        """Return the network that a run ended with."""
        method = full_name(method, [run.method for run in self.runs])
        chosen = [run for run in self.runs if (run.method, run.seed) == (method, seed)]
        if not chosen:
            raise ValueError(f"method, seed: expected those of a run, got {method!r}, {seed}")
        task = chosen[0].run.load_task(self.device, seed)
        return solution.load(RunFolder(chosen[0].path), task, self.device)[0]

    def report(self, out: Path | str | None = None) -> Path:
        """Write the HTML report, by default as `report.html` beside the runs."""
        from llqr.lab import report

        target = self.folder / "report.html" if out is None else Path(out)
        report.write(self.runs, target)
        return target

    def __str__(self) -> str:
        return str(self._frame().to_string(**FORMAT))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return str(self._frame().to_html(**FORMAT))

    def _frame(self) -> pd.DataFrame:
        return pd.DataFrame(self.rows()).dropna(axis="columns", how="all")


def compare(
    experiment: Experiment | str | Path | None = None,
    /,
    *,
    methods: Sequence[str] | str | None = None,
    seeds: int = 3,
    out: Path | str | None = None,
    device: str = "auto",
    samples: int | None = None,
    quiet: bool = False,
    settings: Mapping[str, Any] | None = None,
    **given: Any,
) -> Comparison:
    """Train several methods with several seeds on your own model and data.

    Args:
        experiment: an `Experiment` or a Python file. Or leave it out and give the arguments of `Experiment`:
            `compare(model=..., loss=..., train=..., test=...)`.
        methods: such as `["sgdm", "sam", "llqr+sam"]`, the default with SGD as base.
        seeds: how many, counted from 0.
        out: the folder for the folders of the runs. The same call finds finished runs there and resumes others.
            Default: a temporary folder.
        device: "auto", "cpu", "cuda" or "cuda:N".
        samples: how many training samples sharpness is measured on (default: 512; 0: do not measure it).
        quiet: show no progress.
        settings: any setting by its dotted name, as `--set` of the command line, such as `{"training.epochs": 5}`.
        given: the arguments of `Experiment`.
    """
    if not isinstance(seeds, int) or seeds < 1:
        raise ConfigurationError(f"seeds must be how many, at least 1, got {seeds!r}.")
    chosen = _recipe(experiment, settings or {}, given)
    folder = Path(tempfile.mkdtemp(prefix="llqr-")) if out is None else Path(out)
    where = machine.choose_device(device)
    planned = plan(chosen.data.name, chosen, chosen.listed(methods or None, "methods"), range(seeds), folder)
    with Stop() as stop, Display(len(planned), quiet=quiet) as display:
        try:
            carry_out(planned, Execution(where), stop, display)
        except (Diverged, Stopped) as error:  # the other runs are there
            raise type(error)(f"{error} The folder is out={str(folder)!r}.") from error
    analyst = Analyst(where, samples)
    for one in planned:
        if analyst.needed(RunFolder(one.path)):
            analyst.measure(RunFolder(one.path), one.run)
    # An experiment that is an object has another source in every program: that of now, not that of the first one.
    made = ((stored.read(one.path), plain(one.to_dict())) for one in planned)
    return Comparison([replace(run, config=run.config | asked) for run, asked in made], folder, where)


def _recipe(
    experiment: Experiment | str | Path | None, settings: Mapping[str, Any], given: Mapping[str, Any]
) -> Recipe:
    if isinstance(experiment, str | Path):
        name = str(experiment)
        if given or not is_file(name):
            raise ConfigurationError(f"experiment must be a Python file by itself, got {name!r}.")
        return recipes.load(name, settings=settings)
    if experiment is not None and given:
        raise ConfigurationError("experiment must be given by itself, without arguments of Experiment.")
    made = experiment or Experiment(**given)
    label = made.name or "experiment"
    return recipes.of_experiment(made, label, experiments.hold(made, label), recipes.as_layers(settings))

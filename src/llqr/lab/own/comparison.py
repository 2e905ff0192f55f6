"""`llqr.lab.compare`: methods on one's own model and data, from a program or a notebook; its table shows itself."""

import html
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

from llqr.lab import machine
from llqr.lab.analysis import solution
from llqr.lab.analysis.solution import Analyst
from llqr.lab.config.recipe import ALIASES, Recipe
from llqr.lab.errors import ConfigurationError, Stopped
from llqr.lab.number_table import decimals, spread
from llqr.lab.own import load
from llqr.lab.own.load import Override, mixed_bases
from llqr.lab.progress import Display
from llqr.lab.results.against import welch
from llqr.lab.results.summary import Summary, summarise
from llqr.lab.runs import stored
from llqr.lab.runs.folder import RunFolder
from llqr.lab.runs.planned import plan
from llqr.lab.runs.provenance import made_by
from llqr.lab.runs.stored import StoredRun
from llqr.lab.stop import Stop
from llqr.lab.tasks.own import sources
from llqr.lab.tasks.own.experiment import Experiment
from llqr.lab.tasks.task import TaskCache
from llqr.lab.training.carry_out import carry_out
from llqr.lab.training.loop import Execution

NAME = "experiment"


@dataclass(frozen=True)
class Comparison:
    """Finished runs of several methods; in a notebook and in `print` it is their table.

    Attributes:
        runs: every run, with its configuration, log, result and folder.
        folder: where their folders are.
        notes: what must be known to read the table.
    """

    runs: Sequence[StoredRun]
    folder: Path
    device: torch.device
    notes: Sequence[str] = ()

    @property
    def summaries(self) -> list[Summary]:
        """The methods, each over its seeds."""
        return summarise(run.result for run in self.runs if run.result is not None)

    def rows(self) -> list[dict[str, Any]]:
        """The table as plain numbers, for `pandas.DataFrame` and the like."""
        first, *_ = summaries = self.summaries
        found = []
        for one in summaries:
            measured = (run.analysis for run in self.runs if run.method == one.method and run.analysis is not None)
            sharpness = [analysis["sharpness"]["top"]["value"] for analysis in measured]
            other = one is not first
            found.append(
                {
                    "method": one.method,
                    f"best {one.metric}": one.best_mean,
                    "std": one.best_std,
                    f"last {one.metric}": one.last_mean,
                    "n": one.n,
                    f"- {first.method}": one.best_mean - first.best_mean if other else None,
                    "p": welch(one.best, first.best) if other else None,
                    "top eigenvalue": fmean(sharpness) if sharpness else None,
                    f"s / {one.counted_in}": one.seconds,
                    f"time / {first.method}": one.relative_time,
                }
            )
        return found

    def model(self, method: str, seed: int = 0) -> nn.Module:
        """The network that a run ended with."""
        method = ALIASES.get(method, method)
        chosen = [run for run in self.runs if (run.method, run.seed) == (method, seed)]
        if not chosen:
            made = ", ".join(dict.fromkeys(run.method for run in self.runs))
            raise ValueError(f"method, seed: expected one of {made} with a seed that was run, got {method!r}, {seed}")
        task = TaskCache(self.device).load(chosen[0].run, seed)
        return solution.load(RunFolder(chosen[0].path), task, self.device)[0]

    def report(self, out: Path | str | None = None) -> Path:
        """Write the HTML report, by default as `report.html` beside the runs."""
        from llqr.lab import report

        target = self.folder / "report.html" if out is None else Path(out)
        report.write(self.runs, target)
        return target

    def __str__(self) -> str:
        headings, rows = self._texts()
        widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
        left, *others = widths
        lines = ["  ".join([row[0].ljust(left), *map(str.rjust, row[1:], others)]) for row in (headings, *rows)]
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], *self._explanations()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        headings, rows = self._texts()
        head = "".join(f"<th>{html.escape(text)}</th>" for text in headings)
        body = "".join(f"<tr>{''.join(f'<td>{html.escape(text)}</td>' for text in row)}</tr>" for row in rows)
        notes = "".join(f"<p><small>{html.escape(note)}</small></p>" for note in self._explanations())
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{notes}"

    def _texts(self) -> tuple[list[str], list[list[str]]]:
        """The table as it is printed: columns that are empty everywhere are left out."""
        rows = self.rows()
        shown = [key for key in rows[0] if key != "std" and any(row[key] is not None for row in rows)]
        return shown, [[_text(row, key) for key in shown] for row in rows]

    def _explanations(self) -> list[str]:
        first = self.runs[0].method
        test = f"± is the standard deviation over n seeds; p is Welch's, of the difference to {first}."
        return [*([test] if self.summaries[0].n > 1 else []), *self.notes]


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
    """Train several methods with several seeds on one's own model and data.

    Args:
        experiment: an `Experiment`, a Python file, `"package.module:function"` or a folder of images. Instead of it,
            the arguments of `Experiment` may be given: `compare(model=..., loss=..., train=..., test=...)`.
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
    label, chosen, notes = _recipe(experiment, list((settings or {}).items()), given)
    folder = Path(tempfile.mkdtemp(prefix="llqr-")) if out is None else Path(out)
    where = machine.choose_device(device)
    planned = plan(label, chosen, chosen.listed(methods or None, "methods"), range(seeds), folder)
    with made_by("llqr.lab.compare"), Stop() as stop, Display(len(planned), quiet=quiet) as display:
        try:
            carry_out(planned, Execution(where), stop, display)
        except Stopped as error:
            raise Stopped(f"{error} The folder is out={str(folder)!r}.") from error
    analyst = Analyst(where, samples)
    for one in planned:
        if analyst.needed(RunFolder(one.path)):
            analyst.measure(RunFolder(one.path))
    notes += mixed_bases(one.run for one in planned)
    return Comparison([stored.read(one.path) for one in planned], folder, where, notes)


def _recipe(
    experiment: Experiment | str | Path | None, overrides: list[Override], given: Mapping[str, Any]
) -> tuple[str, Recipe, list[str]]:
    if isinstance(experiment, str | Path):
        if given:
            raise TypeError(f"{next(iter(given))}: not with {str(experiment)!r}; settings can change it")
        name = str(experiment)
        if not load.is_named_by(name):
            raise ConfigurationError(
                f"experiment must be a Python file, package.module:function or a folder of images, got {name!r}."
            )
        sources.forget()
        return load.label(name), load.load(name, overrides), []
    if experiment is not None and not isinstance(experiment, Experiment):
        raise TypeError(f"experiment: expected an Experiment or the name of a file, got {type(experiment).__name__}")
    known = [field.name for field in fields(Experiment)]
    for name in given:
        if name not in known:
            raise TypeError(f"{name}: no argument of compare, and none of Experiment, which are {', '.join(known)}")
    missing = [name for name in ("model", "loss", "train", "test") if experiment is None and name not in given]
    if missing:
        raise TypeError(f"{missing[0]}: must be given")
    made = Experiment(**given) if experiment is None else replace(experiment, **given)
    notes = ["All seeds start from the same weights; give a function as model to draw new ones."]
    label = made.name or NAME
    return label, load.hold(made, label, overrides), notes if isinstance(made.model, nn.Module) else []


def _text(row: Mapping[str, Any], key: str) -> str:
    value = row[key]
    if value is None:
        return ""
    if isinstance(value, str | int):
        return str(value)
    best = next(number for name, number in row.items() if name.startswith("best "))
    texts = {
        "best": spread(value, row["std"]),
        "last": spread(value),
        "-": f"{value:+.{decimals(best)}f}",
        "p": f"{value:.2g}",
        "top": f"{value:.3g}",
        "s": f"{value:.4g}",
        "time": f"{value:.2f}x",
    }
    return texts[key.partition(" ")[0]]

"""The commands that make runs: `llqr train`, `llqr compare` and `llqr reproduce`."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import typer

from llqr.lab import machine
from llqr.lab.cli import options
from llqr.lab.cli.options import PLAIN, with_options
from llqr.lab.cli.terminal import show
from llqr.lab.config import recipe
from llqr.lab.config.recipe import Recipe
from llqr.lab.errors import ConfigurationError, Diverged, RunsFailed, Stopped
from llqr.lab.names import check_folder_name, check_known
from llqr.lab.own import is_file
from llqr.lab.progress import Display
from llqr.lab.results.summary import as_table, choices, summarise
from llqr.lab.runs.folder import RunFolder
from llqr.lab.runs.planned import PlannedRun, describe, explain, plan
from llqr.lab.stop import Stop
from llqr.lab.training.carry_out import carry_out, carry_out_together
from llqr.lab.training.loop import Execution
from llqr.lab.writing import check_file, check_folder


@contextmanager
def own_code() -> Iterator[None]:
    """Code of the user's own may print, but stdout is for results; its `sys.exit` does not mean that all is done."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except SystemExit as error:
        raise ConfigurationError(f"the experiment called sys.exit({error.code!r}) before it was done.") from error


WHAT = "A recipe, recipe@variant, a TOML file, or your own experiment: file.py or file.py:function."
Jobs = Annotated[
    int | None,
    typer.Option(
        min=1, help="Runs at a time, each in a process of its own. More than one: --shared-device, and MPS on a GPU."
    ),
]
Methods = Annotated[
    str | None, typer.Option(help="Methods, separated by commas (default: those of the recipe's table).")
]


@dataclass(frozen=True)
class RunOptions:
    """What all these commands can be told: which settings to change, where files go, and how to run."""

    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="Override a setting of the recipe: key=value, any number of times."),
    ] = None
    out: Annotated[Path, typer.Option(help="Folder for the folders of the runs.")] = Path("runs")
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder that holds the data sets (default: data.root of the recipe).")
    ] = None
    device: options.Device = "auto"
    capture: Annotated[
        bool | None,
        typer.Option(
            "--capture/--no-capture", help="Capture passes and refreshes as CUDA graphs (default: on a CUDA device)."
        ),
    ] = None
    compiled: Annotated[
        bool,
        typer.Option("--compile", help="Compile passes and refreshes with torch.compile: slow to start, then faster."),
    ] = False
    max_minutes: Annotated[
        float | None, typer.Option(min=0, help="Stop after this many minutes, with a checkpoint and exit code 75.")
    ] = None
    checkpoint_minutes: Annotated[
        float, typer.Option(min=0, help="Fewest minutes between checkpoints, which are written at evaluations.")
    ] = 5.0
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also log for TensorBoard, in the folder of the run.")
    ] = False
    keep: Annotated[
        Path | None,
        typer.Option(
            help="Append the finished runs to this file of results, such as results/cifar100.jsonl, and their curves "
            "to the folder curves beside it."
        ),
    ] = None
    shared_device: Annotated[
        bool,
        typer.Option(
            "--shared-device", help="Other programs use the device meanwhile: `llqr table` leaves out the times."
        ),
    ] = False
    quiet: options.Quiet = False
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the resolved configuration and the memory of the metric.")
    ] = False

    def train_command(self, name: str, planned: PlannedRun) -> list[str]:
        """The command of a process that makes one run of the recipe ``name``."""
        run = {"method": planned.run.method, "seed": planned.seed, "out": self.out, "data-dir": self.data_dir}
        # Not "auto": a process that does not see the GPU must not train on the CPU.
        run |= {"device": self.execution.device, "checkpoint-minutes": self.checkpoint_minutes}
        flags = {"compile": self.compiled, "tensorboard": self.tensorboard, "shared-device": self.shared_device}
        flags |= {"capture": self.capture is True, "no-capture": self.capture is False}
        given = [f"--{option}={value}" for option, value in run.items() if value is not None]
        given += [f"--{flag}" for flag, wanted in flags.items() if wanted]
        given += [f"--set={override}" for override in self.overrides or ()]
        return [sys.executable, "-m", "llqr", "train", name, *given]

    @own_code()
    def load(self, name: str) -> Recipe:
        """Load a recipe with the changes from the command line."""
        overrides = self.overrides or []
        if is_file(name):
            from llqr.lab.own import recipe as own

            if self.data_dir is not None:
                raise ConfigurationError(f"--data-dir belongs to built-in data sets, and {name} brings its own.")
            return own.load(name, overrides)
        root = [] if self.data_dir is None else [f"data.root={json.dumps(str(self.data_dir))}"]
        return recipe.load(name, [*overrides, *root])

    @cached_property
    def execution(self) -> Execution:
        device = machine.choose_device(self.device)
        if self.capture and device.type != "cuda":
            raise ConfigurationError(f"--capture needs a CUDA device, got {device}.")
        capture = device.type == "cuda" if self.capture is None else self.capture
        return Execution(device, capture, self.compiled, self.checkpoint_minutes, self.tensorboard, self.shared_device)


DEFAULTS = RunOptions()
app = typer.Typer(**PLAIN)


@app.command()
@with_options
def train(
    name: Annotated[str, typer.Argument(metavar="RECIPE", help=WHAT)],
    method: Annotated[str | None, typer.Option(help="The method (default: the first of the recipe's table).")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**64 - 1, help="Seed of everything random in the run.")] = 0,
    how: RunOptions = DEFAULTS,
) -> None:
    """Train one method of a recipe with one seed, or resume a run that was stopped."""
    chosen = how.load(name)
    wanted = chosen.run(method or chosen.columns[0], "--method").method
    planned = plan(_filed_under(name, chosen), chosen, [wanted], [seed], how.out)
    results = _make(planned, how, Stop(how.max_minutes))
    if results is not None:
        _print(results, how)
        _keep(planned, how)


@app.command()
@with_options
def compare(
    names: Annotated[list[str], typer.Argument(metavar="RECIPE...", help=f"{WHAT} Any number of them.")],
    methods: Methods = None,
    seeds: Annotated[int, typer.Option(min=1, max=10_000, help="How many seeds, counted from 0.")] = 3,
    jobs: Jobs = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            help="Run with each value of a setting, KEY=VALUE,VALUE,..., and choose one by the last evaluation on "
            "data held out of the training set (data.options.validation)."
        ),
    ] = None,
    how: RunOptions = DEFAULTS,
) -> None:
    """Train several methods with several seeds, print them side by side and write report.html."""
    how = replace(how, shared_device=how.shared_device or (jobs or 1) > 1)
    planned: list[PlannedRun] = []
    commands: list[list[str]] = []
    for name in names:
        others = {one.recipe for one in planned}
        for setting in _swept(sweep):
            own = replace(how, overrides=[*(how.overrides or ()), *setting], out=how.out.joinpath(*setting))
            chosen = own.load(name)
            label = _filed_under(name, chosen)
            if label in others:
                raise ConfigurationError(f"RECIPE: two recipes are filed under {label}; rename one.")
            if sweep is not None:
                _check_held_out(chosen)
            known = [(one.recipe, one.seed, one.run) for one in planned]
            runs = plan(label, chosen, chosen.listed(methods, "--methods"), range(seeds), own.out, setting)
            # What the swept setting does not change is run once.
            runs = [one for one in runs if (label, one.seed, one.run) not in known]
            planned += runs
            commands += [own.train_command(name, one) for one in runs]
    stop = Stop(how.max_minutes)
    failed: Exception | None = None
    try:
        if _make(planned, how, stop, jobs, commands) is None:
            return
    except (Diverged, RunsFailed) as error:
        failed = error  # the others are shown, and a value with which the training diverges is not chosen
    made = [(one, result) for one in planned if (result := RunFolder(one.path).result()) is not None]
    named = [(one.recipe, result | {"recipe": one.name}) for one, result in made]
    _print([result for _, result in named], how)
    if sweep is not None and not how.as_json:
        for name in dict.fromkeys(recipe for recipe, _ in named):
            print("\n".join(choices([result for recipe, result in named if recipe == name], seeds)))
    if failed is None:
        _keep(planned, how)
    if made:
        _report([one for one, _ in made], how, stop)
    if failed is not None:
        raise failed


@app.command()
@with_options
def reproduce(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="A table of the paper; `llqr recipes` lists them.")],
    row: Annotated[list[str] | None, typer.Option(help="Only this row of the table, any number of times.")] = None,
    variant: Annotated[str | None, typer.Option(help="A variant of the recipes, such as short.")] = None,
    methods: Methods = None,
    seeds: Annotated[int | None, typer.Option(min=1, max=10_000, help="How many seeds (default: the paper's).")] = None,
    jobs: Jobs = None,
    how: RunOptions = DEFAULTS,
) -> None:
    """Make the runs of a table of the paper, except those that are finished.

    With --keep: also except those that the files beside it hold; and print the table.
    """
    how = replace(how, shared_device=how.shared_device or (jobs or 1) > 1)
    planned: list[PlannedRun] = []
    for label in _rows(table, row or (), variant):
        chosen = how.load(label)
        planned += plan(label, chosen, chosen.listed(methods, "--methods"), range(seeds or chosen.seeds), how.out)
    if how.keep is not None:
        from llqr.lab.cli.report import show_table
        from llqr.lab.results import measurements, tables

        known, every = measurements.read(how.keep.parent), len(planned)
        planned = [one for one in planned if not tables.counts(one.run, one.seed, known)]
        print(f"{every - len(planned)} of {every} runs are in {how.keep.parent} already", file=sys.stderr)
    commands = [how.train_command(one.recipe, one) for one in planned]
    results = _make(planned, how, Stop(how.max_minutes), jobs, commands)
    if results is None:
        return
    _print(results, how)
    if how.keep is not None:
        _keep(planned, how)
        if not how.as_json:
            shown = table if variant is None else f"{table}@{variant}"
            show_table(tables.build(shown, measurements.read(how.keep.parent)).of_rows(row or ()))


def _filed_under(name: str, chosen: Recipe) -> str:
    """The name of a recipe in the paths of its runs: that of a file without folder and ending."""
    if is_file(name):
        return chosen.data.name
    plain, at, variant = name.partition("@")
    return (Path(plain).stem if plain.endswith(".toml") else plain) + at + variant


def _swept(text: str | None) -> list[list[str]]:
    """The overrides of a sweep, one list for each value; without one, nothing is overridden once."""
    if text is None:
        return [[]]
    key, equals, values = text.partition("=")
    if not key or not equals or not all(value.strip() for value in values.split(",")):
        raise ConfigurationError(f"--sweep must be KEY=VALUE,VALUE,..., got {text!r}.")
    settings = dict.fromkeys(f"{key}={value.strip()}" for value in values.split(","))
    for setting in settings:
        check_folder_name("--sweep: each setting", setting)
    return [[setting] for setting in settings]


def _check_held_out(chosen: Recipe) -> None:
    run = chosen.run(chosen.columns[0])
    if run.task_type.split_of(run) == "test":
        raise ConfigurationError(
            "--sweep chooses by data held out of the training set: give data.options.validation, such as "
            "--set data.options.validation=5000, or valid= in an experiment of your own."
        )


def _rows(table: str, chosen: Sequence[str], variant: str | None) -> list[str]:
    """The recipes of some rows of a table, or of all that have the variant, each once."""
    check_known("TABLE", table, dict.fromkeys(name.partition("/")[0] for name in recipe.names()))
    known = recipe.rows(table)
    for row in chosen:
        check_known("--row", row, known)
    at = "" if variant is None else f"@{variant}"
    return [known[row] + at for row in dict.fromkeys(chosen or recipe.rows(table, variant))]


def _make(
    planned: list[PlannedRun], how: RunOptions, stop: Stop, jobs: int | None = None, commands: Sequence[list[str]] = ()
) -> list[dict[str, Any]] | None:
    """Carry out the runs, with ``jobs`` by these commands, and return their results; or only say what they are.

    If not all can be made, those that are finished are kept.
    """
    execution = how.execution
    if how.capture is None and not all(one.run.task_type.captured for one in planned):
        execution = replace(execution, capture=False)
    if how.keep is not None:
        check_file("--keep", how.keep, ".jsonl")
        check_folder("--keep", how.keep.parent / "curves")
    if how.dry_run:
        with own_code():
            shown = json.dumps(describe(planned), indent=1) if how.as_json else "\n".join(explain(planned))
        print(shown)
        return None
    check_folder("--out", how.out)
    try:
        with own_code(), stop, Display(len(planned), quiet=how.quiet) as display:
            if jobs is None:
                return carry_out(planned, execution, stop, display)
            if jobs > 1 and execution.device.type == "cuda":
                print(machine.share_gpu(), file=sys.stderr)
            return carry_out_together(planned, commands, jobs, stop, display)
    except Exception:
        _keep(planned, how)
        raise


def _print(results: Sequence[dict[str, Any]], how: RunOptions) -> None:
    """Print the results of runs, a table for every recipe."""
    summaries = summarise(results)
    if how.as_json:
        listed = json.loads(summaries.drop(columns="last").to_json(orient="records", double_precision=15))
        print(json.dumps({"runs": results, "summaries": listed}, indent=1))
        return
    for _, rows in summaries.groupby("recipe", sort=False):
        show(as_table(rows, timed=not how.shared_device))


@own_code()
def _report(planned: Sequence[PlannedRun], how: RunOptions, stop: Stop) -> None:
    """Write the page on the runs, for which their solutions are measured, unless the last run was to be stopped."""
    if stop.reason:
        raise Stopped(f"Stopped by {stop.reason} after the last run; the same command writes the report.")
    from llqr.lab.cli.report import write_report  # a run does not need what the page of it needs

    page = how.out / "report.html"
    write_report([one.path for one in planned], page, how.execution.device, quiet=how.quiet)
    if not how.quiet:
        print(f"report: {page}", file=sys.stderr)


def _keep(planned: Sequence[PlannedRun], how: RunOptions) -> None:
    """Append the finished ones of these runs to the file of results, if one was named."""
    if how.keep is not None:
        from llqr.lab.results import measurements
        from llqr.lab.runs import stored

        finished = [stored.read(one.path) for one in planned if RunFolder(one.path).result() is not None]
        new, already = measurements.add(finished, how.keep)
        print(f"{how.keep}: {new} added, {already} there already", file=sys.stderr)

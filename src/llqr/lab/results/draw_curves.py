"""Kept curves as a picture: what was evaluated, the training loss, and how much the metric changed a gradient."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llqr.lab import pictures
from llqr.lab.errors import ConfigurationError
from llqr.lab.grouping import grouped
from llqr.lab.names import unknown
from llqr.lab.results import curves
from llqr.lab.runs.apart import settings_apart

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Line = dict[str, Any]
HEIGHT = 1.9
"""Inches per panel."""
CHANGE = "refresh_change"
LONG = 28
"""Characters of a name, of which two do not stand side by side in a legend."""


def save(files: Sequence[Path], path: Path, methods: Sequence[str] = ()) -> None:
    """Draw the curves of these files, or only those of some methods."""
    lines = [line for file in files for line in curves.read(file).values()]
    known = list(dict.fromkeys(line["run"]["method"] for line in lines))
    for method in methods:
        if method not in known:
            raise ConfigurationError(unknown("--method", method, known))
    chosen = [line for line in lines if line["run"]["method"] in (methods or known)]
    if not chosen:
        raise ConfigurationError("FILES hold no curve.")
    title = ", ".join(_named(chosen, several_recipes=True))
    pictures.save(draw(chosen), path, title, ", ".join(map(pictures.digest, files)))


@pictures.styled
def draw(lines: Sequence[Line]) -> "Figure":
    """One panel per quantity, one line per run, one colour per method and setting."""
    named = _named(lines, several_recipes=len({line["recipe"] for line in lines}) > 1)
    panels = dict(_panels(lines))
    figure, places = pictures.column([HEIGHT] * len(panels))
    for axes, (column, label) in zip(places, panels.items(), strict=True):
        for number, (name, runs) in enumerate(named.items()):
            _lines(axes, column, name, number, [run for run in runs if column in run])
        axes.set_ylabel(pictures.literal(label))
        if column != CHANGE and (late := _late([line[column] for line in lines])):
            pictures.focus(axes, late)
        axes.set_xlim(0, max(line["epoch"][-1] for line in lines))
    places[-1].set_xlabel("epoch")
    pictures.legend_above(figure, places[0], columns=2 if max(map(len, named)) <= LONG else 1)
    stopped = [
        f"{name}, seed {run['seed']}, stopped at epoch {run['epoch'][-1]:g}"
        for name, runs in named.items()
        for run in runs
        if not run["finished"]
    ]
    pictures.note_below(figure, pictures.literal("\n".join(["one line per run", *stopped])))
    return figure


def _named(lines: Sequence[Line], *, several_recipes: bool) -> dict[str, list[Line]]:
    """The curves by what they are called: runs of one name differ in nothing but their seed."""
    groups = grouped(lines, lambda line: (line["recipe"] if several_recipes else "", line["run"]["method"]))
    named: dict[str, list[Line]] = {}
    for recipe_and_method, own in groups.items():
        name = " ".join(filter(None, recipe_and_method))
        for line, setting in zip(own, settings_apart([line["run"] for line in own]), strict=True):
            named.setdefault(f"{name}, {setting}" if setting else name, []).append(line)
    return named


def _panels(lines: Sequence[Line]) -> Iterator[tuple[str, str]]:
    """The columns to draw, and what their axes are called: what is evaluated beside the loss, or else that loss."""
    kinds = {(line["split"], list(line)[list(line).index("step") + 1]) for line in lines}
    if len(kinds) > 1:
        found = " and ".join(sorted(f"{split} {column}" for split, column in kinds))
        raise ConfigurationError(f"FILES: the runs were evaluated by {found}; draw them apart.")
    split, evaluated = kinds.pop()
    yield evaluated, f"{split} loss" if evaluated == f"{split}_loss" else f"{split} {evaluated}"
    yield "train_loss", "training loss"
    if any(CHANGE in line for line in lines):
        yield CHANGE, "|Ug - g| / |g|"


def _late(columns: Sequence[Sequence[float | None]]) -> list[float]:
    """Without the first steep quarter, beside which the differences at the end could not be seen."""
    return [value for column in columns for value in column[len(column) // 4 :] if value is not None]


def _lines(axes: "Axes", column: str, name: str, number: int, runs: Sequence[Line]) -> None:
    colour, dashes = pictures.look(number)
    for place, run in enumerate(runs):
        steps_per_epoch = run["step"][-1] / run["epoch"][-1]
        x = [step / steps_per_epoch for step in run["refresh_step"]] if column == CHANGE else run["epoch"]
        y = [float("nan") if value is None else value for value in run[column]]
        label = "_" if place else pictures.literal(name)
        marker = "o" if len(x) == 1 else None
        axes.plot(x, y, color=colour, linestyle=dashes, linewidth=1.1, marker=marker, label=label)

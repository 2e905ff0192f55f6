"""The command that uses a trained model: `llqr translate`."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from llqr.lab import machine
from llqr.lab.analysis.solution import recipe_of, run_of
from llqr.lab.cli import options
from llqr.lab.config.strict import ConfigurationError
from llqr.lab.errors import DataError
from llqr.lab.runs.folder import RunFolder
from llqr.lab.tasks.translation import Translator
from llqr.lab.text import parallel_text
from llqr.lab.text.parallel_text import ParallelText
from llqr.lab.training import checkpoint
from llqr.lab.training.precision import Precision

LINES_AT_ONCE = 2000
"""So that the translation of a long file can be watched, and memory does not depend on its length."""


def mount(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("translate")(translate)


def translate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run that learned to translate.")],
    beam: Annotated[int | None, typer.Option(min=1, help="Width of the search (default: that of the run).")] = None,
    length_penalty: Annotated[
        float | None, typer.Option(help="Above 1 favours long translations (default: that of the run).")
    ] = None,
    data_dir: options.DataDir = None,
    device: options.Device = "auto",
) -> None:
    """Translate the lines of stdin with the best weights of a run; one line out for every line in."""
    search = {"beam": beam, "length_penalty": length_penalty}
    asked = {key: value for key, value in search.items() if value is not None}
    trained = load(RunFolder(run), machine.choose_device(device), data_dir, **asked)
    number = 1
    while lines := list(islice(sys.stdin.buffer, LINES_AT_ONCE)):
        print("\n".join(trained.translate(list(_decoded(lines, number)), number)), flush=True)
        number += len(lines)


@dataclass(frozen=True)
class Trained:
    """A model that translates, and the text that it learned from."""

    model: nn.Module
    text: ParallelText
    translator: Translator
    precision: Precision

    def translate(self, sentences: list[str], first: int = 1) -> list[str]:
        """One line for every sentence; ``first`` is the number of the first one, for the message of an error."""
        try:
            tokens = self.text.encode(sentences)
        except ModuleNotFoundError as error:
            raise DataError(str(error)) from error
        longest = self.model.max_length
        for number, length in enumerate((tokens.lengths + 1).tolist(), start=first):
            if length > longest:
                raise DataError(f"Line {number} has {length:,} tokens, more than the {longest:,} that the model reads.")
        with self.precision.autocast():
            return self.translator.translate(self.model, tokens)


def load(folder: RunFolder, device: torch.device, data_dir: Path | None = None, **search: Any) -> Trained:
    """The model of a run with its best weights: those of a finished one, or the best so far.

    ``search`` takes the place of the run's own options of beam search.
    """
    if not (folder.path / "config.json").exists():
        raise DataError(f"{folder.path} holds no run: there is no config.json in it.")
    run = run_of(folder.config())
    if run.task.name != "translation":
        raise ConfigurationError(f"RUN must have learned to translate, {folder.path} is a run of {run.task.name}.")
    if data_dir is not None:
        run = replace(run, data=replace(run.data, root=str(data_dir)))
    recipe, place = recipe_of(run), Path(run.data.root) / run.data.name
    best = _best(folder, device)
    try:
        text = parallel_text.load(place)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        raise DataError(str(error)) from error
    if best["data"] != text.key:
        raise DataError(
            f"{place} was prepared as {text.key}, but {folder.path} was trained on {best['data']}: choose the folder "
            "of that with --data-dir, or prepare the text as it was."
        )
    model = recipe.build_model()
    model.load_state_dict(best["model"])
    translator = Translator(text, replace(recipe.task_options, **search), run.training.eval_batch_size, device)
    # Autocast is for the kind of device that a model was trained on; elsewhere full precision is the safe choice.
    precision = Precision(run.training.precision if device.type == "cuda" else "fp32", device)
    precision.set_up()
    return Trained(model.to(device).eval(), text, translator, precision)


def _best(folder: RunFolder, device: torch.device) -> dict[str, Any]:
    if folder.best.exists():
        return checkpoint.load(folder.best, device)
    if not folder.checkpoint.exists():
        raise DataError(f"{folder.best} is not there, and neither is {folder.checkpoint.name}.")
    best = checkpoint.load(folder.checkpoint, device)["best"]
    if best is None:
        raise DataError(f"{folder.path} was stopped before its first evaluation: it has no best weights yet.")
    return best


def _decoded(lines: list[bytes], first: int) -> Iterator[str]:
    for number, line in enumerate(lines, start=first):
        try:
            yield line.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise DataError(f"Line {number} of stdin is not UTF-8: {error.reason}.") from error

"""The command that uses a trained model: `llqr translate`."""

import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer

from llqr.lab import machine
from llqr.lab.cli import options
from llqr.lab.cli.lazy_group import PLAIN
from llqr.lab.errors import ConfigurationError, DataError
from llqr.lab.models.transformer import TranslationTransformer
from llqr.lab.passes import Precision
from llqr.lab.runs.folder import RunFolder
from llqr.lab.tasks.translation import TranslationTask
from llqr.lab.training import checkpoint

LINES_AT_ONCE = 2000
"""So that a long file is translated as it is read, and memory does not depend on its length."""


app = typer.Typer(**PLAIN)


@app.command()
def translate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a translation run.")],
    beam: Annotated[int | None, typer.Option(min=1, help="Beam width (default: that of the run).")] = None,
    length_penalty: Annotated[
        float | None, typer.Option(help="Above 1 favours long translations (default: that of the run).")
    ] = None,
    data_dir: options.DataDir = None,
    device: options.Device = "auto",
) -> None:
    """Translate the lines of stdin with the best weights of a run; one line out for every line in."""
    search = {"beam": beam, "length_penalty": length_penalty}
    asked = {key: value for key, value in search.items() if value is not None}
    task, model, precision = load(RunFolder(run), machine.choose_device(device), data_dir, asked)
    first = 1
    while lines := list(islice(sys.stdin.buffer, LINES_AT_ONCE)):
        tokens = task.text.encode([_decoded(line, number) for number, line in enumerate(lines, start=first)])
        for number, length in enumerate((tokens.lengths + 1).tolist(), start=first):
            if length > model.max_length:
                most = f"more than the {model.max_length:,} that the model reads"
                raise DataError(f"Line {number} has {length:,} tokens, {most}.")
        with precision.autocast():
            print("\n".join(task.translate(model, tokens)), flush=True)
        first += len(lines)


def load(
    folder: RunFolder, device: torch.device, data_dir: Path | None, search: dict[str, Any]
) -> tuple[TranslationTask, TranslationTransformer, Precision]:
    """The task of a run and its model with the best weights, or the best so far if it is not finished.

    ``search`` overrides the run's options of beam search.
    """
    if not (folder.path / "config.json").exists():
        raise DataError(f"{folder.path} holds no run: there is no config.json in it.")
    run = folder.run()
    if run.task.name != "translation":
        raise ConfigurationError(f"RUN must be a translation run, but {folder.path} is a run of {run.task.name}.")
    if data_dir is not None:
        run = replace(run, data=replace(run.data, root=str(data_dir)))
    run = replace(run, task=replace(run.task, options=run.task.options | search))
    best = _best(folder, device)
    task = cast(TranslationTask, run.load_task(device))
    if best["data"] != task.text.key:
        raise DataError(
            f"{run.data_path} was prepared as {task.text.key}, but {folder.path} was trained on {best['data']}: choose "
            "the folder of that with --data-dir, or prepare the text as it was."
        )
    model = run.build_model()
    model.load_state_dict(best["model"])
    # Autocast belongs to the kind of device that a model was trained on; elsewhere full precision is the safe choice.
    precision = Precision(run.training.precision if device.type == "cuda" else "fp32", device)
    precision.set_up()
    return task, cast(TranslationTransformer, task.place(model).eval()), precision


def _best(folder: RunFolder, device: torch.device) -> dict[str, Any]:
    if folder.best.exists():
        return checkpoint.load(folder.best, device)
    if not folder.checkpoint.exists():
        raise DataError(f"{folder.best} is not there, and neither is {folder.checkpoint.name}.")
    best: dict[str, Any] | None = checkpoint.load(folder.checkpoint, device)["best"]
    if best is None:
        raise DataError(f"{folder.path} was stopped before its first evaluation: it has no best weights yet.")
    return best


def _decoded(line: bytes, number: int) -> str:
    try:
        return line.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise DataError(f"Line {number} of stdin is not UTF-8: {error.reason}.") from error

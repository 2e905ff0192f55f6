"""The command that measures a network that was trained elsewhere: `llqr sharpness`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE
from rich.table import Column, Table
from torch import Tensor, nn

from llqr.lab import machine
from llqr.lab.analysis import sharpness as analysis
from llqr.lab.analysis.solution import surface_of
from llqr.lab.cli import options
from llqr.lab.cli.options import PLAIN
from llqr.lab.cli.runs import RunOptions
from llqr.lab.cli.terminal import show
from llqr.lab.config.run import Run
from llqr.lab.errors import DataError
from llqr.lab.passes import Precision

app = typer.Typer(**PLAIN)
WRAPPERS = ("module.", "_orig_mod.", "model.", "net.")
"""What DDP, `torch.compile` and Lightning modules put before the names of weights."""


@app.command()
def sharpness(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A file with the weights, a state_dict.")],
    name: Annotated[
        str,
        typer.Argument(
            metavar="EXPERIMENT",
            help="Where model and data come from: file.py, file.py:function, or a recipe.",
        ),
    ],
    samples: Annotated[
        int | None, typer.Option(min=1, help="Training samples to measure on (default: a number that suits the task).")
    ] = None,
    rho: Annotated[float, typer.Option(min=0, help="Radius at which the rise of the loss is measured.")] = 0.05,
    products: Annotated[int, typer.Option(min=2, help="Products with the Hessian for its trace.")] = 32,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Override a setting: key=value, any number of times.")
    ] = None,
    data_dir: options.DataDir = None,
    device: options.Device = "auto",
    as_json: options.Json = False,
) -> None:
    """Measure a network that was trained elsewhere: sharpness, loss at SAM's probe, test metric."""
    chosen = RunOptions(overrides=overrides, data_dir=data_dir).load(name)
    found = measure(chosen.run(chosen.columns[0]), checkpoint, machine.choose_device(device), samples, rho, products)
    if as_json:
        print(json.dumps(found, indent=1))
        return
    table = Table("", *(Column(heading, justify="right") for heading in ("value", "error")), box=SIMPLE)
    table.title = f"{checkpoint.name}, {found['samples']} training samples"
    for label, key in (("top eigenvalue of the Hessian", "top_eigenvalue"), ("trace of the Hessian", "trace")):
        table.add_row(label, f"{found[key]['value']:.4g}", f"{found[key]['error']:.2g}")
    rows = {"training loss": found["loss"], f"its rise at SAM's probe, rho {rho:g}": found["rise"]}
    for label, value in (rows | {f"{found['split']} {name}": v for name, v in found["evaluation"].items()}).items():
        table.add_row(label, f"{value:.4g}", "")
    show(table)


def measure(
    run: Run, checkpoint: Path, device: torch.device, samples: int | None, rho: float, products: int
) -> dict[str, Any]:
    """What is measured of the weights in a file, in full float32 and eval mode."""
    Precision("fp32", device).set_up()
    task = run.load_task(device)
    model = task.place(task.new_model(run)).eval()
    load_into(model, checkpoint, device)
    surface, count = surface_of(model, task, run, samples or task.samples_measured)
    top = analysis.measure(surface).top
    gradient = surface.gradient()
    loss = surface.loss(surface.weights)
    with torch.no_grad():
        evaluation = task.evaluate(model)
    return {
        "samples": count,
        "loss": loss,
        "top_eigenvalue": {"value": top.value, "error": top.error, "products": top.steps},
        "trace": analysis.hessian_trace(surface, products=products),
        "rho": rho,
        "rise": surface.loss(surface.weights + rho * gradient / gradient.norm()) - loss,
        "split": task.split,
        "evaluation": evaluation,
        "engine": surface.engine,
    }


def load_into(model: nn.Module, path: Path, device: torch.device) -> None:
    """Give a network the weights of a file: a state_dict, or a checkpoint that holds one as an entry."""
    if not path.is_file():
        raise DataError(f"{path} is not there.")
    try:
        saved = torch.load(path, map_location=device, weights_only=True)
        entries = [entry for entry in [saved, *saved.values()] if isinstance(entry, Mapping)]
    except Exception as error:  # a file of anything raises anything, and torch's advice is to load it unsafely
        raise DataError(
            f"{path} is not a readable file of weights ({type(error).__name__}); write it with "
            "torch.save(model.state_dict(), ...)."
        ) from error
    states = [{name: one for name, one in entry.items() if isinstance(one, Tensor)} for entry in entries]
    saved, own = max(states, key=len), model.state_dict()
    named = {_unwrapped(name, own): one for name, one in saved.items()}
    if named.keys() & own.keys() - saved.keys():  # a wrapper may hold more, such as a loss
        named = {name: one for name, one in named.items() if name in own}
    try:
        model.load_state_dict(named)
    except RuntimeError as error:
        raise DataError(f"{path} does not fit the model: {' '.join(str(error).split())}.") from error


def _unwrapped(name: str, own: Mapping[str, Tensor]) -> str:
    while name not in own and (wrapper := next((one for one in WRAPPERS if name.startswith(one)), None)):
        name = name.removeprefix(wrapper)
    return name

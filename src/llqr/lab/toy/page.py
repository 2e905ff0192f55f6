"""The folder of the toy commands: figures, numbers, and one page that shows them all."""

import base64
import json
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import jinja2

from llqr import __version__
from llqr.lab.toy.experiment import ToyResult

ORDER = ("hover", "escape", "noise", "phase", "selection", "transfer")


def save(result: ToyResult, folder: Path, command: str) -> Path:
    """Write the figures (PNG and SVG) and the numbers of one command, then update the page; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in result.figures.items():
        figure.savefig(folder / f"{name}.png", dpi=160)
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
    record = vars(result) | {"command": command, "figures": list(result.figures)}
    (folder / f"{result.name}.json").write_text(json.dumps(record, indent=1, default=_plain) + "\n")
    parts = [json.loads(file.read_text()) for name in ORDER if (file := folder / f"{name}.json").exists()]
    names = [figure for part in parts for figure in part["figures"]]
    pngs = {figure: base64.b64encode((folder / f"{figure}.png").read_bytes()).decode() for figure in names}
    loader = jinja2.PackageLoader("llqr.lab.toy", ".")
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    page = folder / "report.html"
    page.write_text(environment.get_template("page.html").render(parts=parts, pngs=pngs, version=__version__))
    return page


def _plain(value: Any) -> Any:
    """Arrays, tensors and dataclasses of them as JSON holds them."""
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value.tolist()

"""The folder of the toy commands: figures, numbers, and one page that shows them all."""

import base64
import json
from pathlib import Path
from typing import Any

import jinja2

from llqr import __version__
from llqr.lab.toy.experiment import ToyResult

ORDER = ("hover", "escape", "noise", "phase", "selection", "transfer")

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>The two-scale pothole model</title>
<style>
  body { font: 16px/1.55 system-ui, sans-serif; color: #1a1a1a; max-width: 62rem; margin: 2.5rem auto; }
  body { padding: 0 1rem; }
  h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 3rem; }
  img { width: 100%; height: auto; margin: .5rem 0; }
  img.single { max-width: 34rem; display: block; }
  pre { background: #f5f5f5; padding: .8rem; overflow: auto; max-height: 24rem; font-size: .8rem; }
  summary { cursor: pointer; } .small { color: #555; font-size: .85rem; }
  @media print { details { display: none; } section { break-inside: avoid; } }
</style>
</head>
<body>
<h1>The two-scale pothole model: SAM and LLQR+SAM</h1>
<p>All trajectories were made by the library's own optimizers with the fixed metric U = H_bar<sup>-1</sup>.</p>
{% for part in parts %}
<section id="{{ part.name }}">
<h2>{{ part.title }}</h2>
<p>{{ part.sentences | join(" ") }}</p>
{% for figure in part.figures %}
<a href="{{ figure.svg }}"><img {% if figure.single %}class="single" {% endif %}
  src="data:image/png;base64,{{ figure.png }}" alt="{{ part.title }}: {{ figure.name }}"></a>
{% endfor %}
<p class="small">Made by <code>{{ part.command }}</code>.</p>
<details><summary>Numbers (<a href="{{ part.name }}.json">{{ part.name }}.json</a>)</summary>
<pre>{{ part.numbers }}</pre></details>
</section>
{% endfor %}
<p class="small">llqr {{ version }}</p>
</body>
</html>
"""


def save(result: ToyResult, folder: Path, command: str) -> Path:
    """Write the figures (PNG and SVG) and the numbers of one command, then update the page; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in result.figures.items():
        figure.savefig(folder / f"{name}.png", dpi=160)
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
    record = {
        "name": result.name,
        "title": result.title,
        "command": command,
        "sentences": result.sentences,
        "figures": list(result.figures),
        "numbers": result.numbers,
    }
    (folder / f"{result.name}.json").write_text(json.dumps(record, indent=1) + "\n")
    return write_page(folder)


def write_page(folder: Path) -> Path:
    """Write `report.html` from what the commands have written to `folder` so far."""
    parts = [_section(folder, name) for name in ORDER if (folder / f"{name}.json").exists()]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    page = folder / "report.html"
    page.write_text(environment.from_string(PAGE).render(parts=parts, version=__version__))
    return page


def _section(folder: Path, name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    shown = []
    for figure in record["figures"]:
        png = (folder / f"{figure}.png").read_bytes()
        # Width in pixels is the first field after the PNG header's length and type.
        width = int.from_bytes(png[16:20], "big")
        shown.append(
            {"name": figure, "svg": f"{figure}.svg", "png": base64.b64encode(png).decode(), "single": width < 1200}
        )
    return record | {"figures": shown, "numbers": json.dumps(record["numbers"], indent=1)}

"""What `make demo` prints, as a picture of a terminal, from its kept runs. `python docs/figures/terminal.py`.

The table is printed by the code of `llqr compare`, in the order in which the command trains the recipes.
"""

import io
import json
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI

from llqr.lab.results import summary

ROOT = Path(__file__).parents[2]
RECIPES = ("digits/mlp-noisy", "digits/mlp-clean")
# rich's own template loads a font from a server; this one uses those of the reader.
TEMPLATE = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<title>What make demo prints</title>
<style>
.{unique_id}-matrix {{ font: {char_height}px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; }}
.{unique_id}-matrix {{ line-height: {line_height}px; font-variant-east-asian: full-width; }}
.{unique_id}-title {{ font: bold 18px system-ui, sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def main() -> None:
    lines = (ROOT / "results/demo/digits.jsonl").read_text().splitlines()
    results = [json.loads(line)["result"] for line in lines]
    console = Console(record=True, width=78, file=io.StringIO())
    console.print("[bold green]$[/] make demo", highlight=False)
    for recipe in RECIPES:
        console.print(summary.as_table(summary.summarise(one for one in results if one["recipe"] == recipe)))
    console.print("report: runs/demo/report.html", highlight=False)
    picture = console.export_svg(title="make demo", theme=MONOKAI, code_format=TEMPLATE, unique_id="demo")
    Path(__file__).with_suffix(".svg").write_text(picture)


if __name__ == "__main__":
    main()

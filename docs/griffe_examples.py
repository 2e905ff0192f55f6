"""Doctests of docstrings as code blocks: `>>>` at the start of a line is a quotation in Markdown."""

import re
from typing import Any

import griffe

#: "Example (a title):", which Griffe does not know; it writes "Example: a title" and shows the title alone.
TITLED = re.compile(r"^(\s*)Example \((.+)\):$")


class DoctestBlocks(griffe.Extension):
    """Puts fences around the examples of every docstring, whatever section they are in."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """An example begins with `>>>` and ends at an empty line, or at the end of its indentation."""
    lines: list[str] = []
    indent: str | None = None
    for line in text.split("\n"):
        own = line[: len(line) - len(line.lstrip())]
        if indent is not None and (not line.strip() or len(own) < len(indent)):
            lines.append(f"{indent}```")
            indent = None
        if indent is None and line.lstrip().startswith(">>> "):
            indent = own
            if lines and lines[-1].startswith(indent) and lines[-1].strip():  # text, not a heading
                lines.append("")
            lines.append(f"{indent}```pycon")
        lines.append(TITLED.sub(r"\1Example: Example: \2", line) if indent is None else line)
    if indent is not None:
        lines.append(f"{indent}```")
    return "\n".join(lines)

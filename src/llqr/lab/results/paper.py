"""The numbers that the paper prints."""

import json
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "paper_tables.json"


@cache
def paper() -> dict[str, Any]:
    """All tables of the paper, by name."""
    tables: dict[str, Any] = json.loads(FILE.read_text())
    return tables

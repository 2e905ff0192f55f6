"""The result of a toy experiment: numbers and figures, and how they are saved."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from torch import Tensor

from llqr.lab.runs.json_files import flatten


@dataclass(frozen=True)
class ToyResult:
    """Numbers for the JSON file, of which single ones are printed, and figures by file name."""

    numbers: dict[str, Any]
    figures: dict[str, Figure]


def claim_shares(claims: dict[str, Tensor]) -> dict[str, float]:
    """For each claim the fraction of runs in which it holds."""
    return {claim: float(holds.double().mean()) for claim, holds in claims.items()}


def statistics(values: Tensor) -> dict[str, float]:
    return {"min": float(values.min()), "median": float(values.quantile(0.5)), "max": float(values.max())}


def save(name: str, result: ToyResult, folder: Path, command: str) -> None:
    """Write the figures (PNG and SVG) and the numbers (JSON) of one command."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, figure in result.figures.items():
        figure.savefig(folder / f"{file}.png", dpi=160)
        figure.savefig(folder / f"{file}.svg", metadata={"Date": None})
    record = {"name": name, "numbers": result.numbers, "figures": list(result.figures), "command": command}
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1, default=_plain) + "\n")


def single_numbers(numbers: Mapping[str, Any]) -> list[str]:
    """Lines such as `claims.SAM leaves: 1` of every number that is not part of a list."""
    plain = json.loads(json.dumps(numbers, default=_plain))
    return [f"{name}: {value:.4g}" for name, value in flatten(plain) if isinstance(value, int | float)]


def _plain(value: Any) -> Any:
    """Arrays, tensors and dataclasses of them as JSON holds them."""
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value.tolist()

"""The result of a toy experiment: numbers and figures, and how they are saved."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from torch import Tensor


@dataclass(frozen=True)
class ToyResult:
    """Numbers for the JSON file, of which single ones are printed, and figures by file name."""

    name: str
    numbers: dict[str, Any]
    figures: dict[str, Figure]


def claim_shares(claims: dict[str, Tensor]) -> dict[str, float]:
    """For each claim the fraction of runs in which it holds."""
    return {claim: float(holds.double().mean()) for claim, holds in claims.items()}


def statistics(values: Tensor) -> dict[str, float]:
    return {"min": float(values.min()), "median": float(values.median()), "max": float(values.max())}


def save(result: ToyResult, folder: Path, command: str) -> None:
    """Write the figures (PNG and SVG) and the numbers (JSON) of one command."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in result.figures.items():
        figure.savefig(folder / f"{name}.png", dpi=160)
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
    record = vars(result) | {"command": command, "figures": list(result.figures)}
    (folder / f"{result.name}.json").write_text(json.dumps(record, indent=1, default=_plain) + "\n")


def single_numbers(numbers: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Lines such as `claims.SAM leaves: 1` of every number that is not part of a list."""
    for name, value in numbers.items():
        value = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        if isinstance(value, Mapping):
            yield from single_numbers(value, f"{prefix}{name}.")
        elif isinstance(value, int | float):
            yield f"{prefix}{name}: {value:.4g}"


def _plain(value: Any) -> Any:
    """Arrays, tensors and dataclasses of them as JSON holds them."""
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value.tolist()

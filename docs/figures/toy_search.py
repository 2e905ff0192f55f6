"""Search for the constants of the toy figures: `python docs/figures/toy_search.py [SEED]`, about ten minutes.

Draw landscapes and radii at one learning rate, round them to three digits, and test every claim of both figures on more
and more starts and seeds, in the end on sixteen times as many as the figures show. Rank those that never fail by the
share of jittered copies for which the claims hold. The paths are chaotic, so the order of the finalists depends on
rounding; the constants of the figures are one of them. Prints the finalists as JSON lines, the best first.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from llqr.lab.toy.ring import ToyConstants, off_bottom_starts, run, shared_noise

LEARNING_RATE = 0.02
VARIED = ("lambda_bar", "sharpness", "well_radius", "hardening", "edge", "rho")


@dataclass(frozen=True)
class Finalist:
    """A finalist of the search, with its scores."""

    constants: ToyConstants
    robustness: float
    """Fraction of jittered copies for which every claim of both figures holds on every start and seed."""
    worst_ratio: float
    """Smallest ratio, over noise seeds, of SAM's path length to LLQR+SAM's (unjittered constants)."""


def search(
    candidates: int = 1_500_000,
    finalists: int = 24,
    seeds: int = 32,
    steps: int = 1200,
    copies: int = 16,
    jitter: float = 0.01,
    seed: int = 0,
    progress: Callable[[str], None] = lambda message: None,
) -> list[Finalist]:
    """The finalists, most robust first (ties: the larger worst-case path ratio)."""
    generator = torch.Generator().manual_seed(seed)
    drawn = draw(candidates, generator)
    pool = _take(drawn, _worth_running(drawn))
    pool = _take(pool, _traps_plain_descent(pool))
    progress(f"{candidates} landscapes drawn, {_count(pool)} with a well that traps plain descent and can be left")
    for count in (4, seeds, 16 * seeds):
        holds, ratio = _judge(pool, count, steps)
        order = torch.argsort(ratio, descending=True)
        pool = _take(pool, order[holds[order]])
        progress(f"{_count(pool)} satisfy every claim on {count} starts and seeds")
        pool = _take(pool, torch.arange(_count(pool)) < (finalists if count >= seeds else candidates))
    _, ratio = _judge(pool, seeds, steps)
    holds, _ = _judge(_jittered(pool, copies, jitter, generator), seeds, steps)
    robustness = holds.view(_count(pool), copies).double().mean(1)
    found = [Finalist(_row(pool, i), float(robustness[i]), float(ratio[i])) for i in range(_count(pool))]
    return sorted(found, key=lambda one: (one.robustness, one.worst_ratio), reverse=True)


def draw(count: int, generator: torch.Generator) -> ToyConstants:
    """`count` random landscapes, one per row: `0.2 < eta mu < 1.5` at the well's centre, probes shorter than the well.

    The probes must end inside the well: an iterate whose probe reaches past it can come to rest one probe length away
    from the ring, with the probe at the bottom of the well, and then never reaches the flat basin.
    """

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, generator=generator, dtype=torch.float64)

    lambda_bar = torch.exp(uniform(-2.0, -0.5))
    radius = uniform(0.15, 0.8)
    drawn = {
        "lambda_bar": lambda_bar,
        "sharpness": lambda_bar * (uniform(0.2, 1.5) / LEARNING_RATE - 1),
        "well_radius": radius,
        "hardening": torch.exp(uniform(0.0, 4.0)),
        "edge": uniform(0.1, 0.3),
        "rho": lambda_bar.sqrt() * radius * uniform(0.1, 1.0),
    }
    return ToyConstants(lr=LEARNING_RATE, **{name: _three_digits(value) for name, value in drawn.items()})


def _judge(constants: ToyConstants, seeds: int, steps: int) -> tuple[Tensor, Tensor]:
    """Per row: whether every claim of both figures holds on every start and seed, and the worst path ratio."""
    rows = _count(constants)
    repeated = _take(constants, torch.arange(rows).repeat_interleave(seeds))
    bottom = repeated.landscape.bottom(torch.full((rows * seeds,), 0.8, dtype=torch.float64))
    ejected = run(repeated, bottom, steps, shared_noise(seeds, steps).repeat(1, rows, 1))
    escaped = run(repeated, off_bottom_starts(repeated, seeds, repeats=rows), steps)
    claims = torch.stack([*ejected.ejection_claims().values(), *escaped.escape_claims().values()])
    ratio = ejected.path_to_flat("sam") / ejected.path_to_flat("llqr+sam")
    return claims.all(0).view(rows, seeds).all(1), ratio.view(rows, seeds).amin(1)


def _worth_running(constants: ToyConstants) -> Tensor:
    """The ring is a well that lies above the flat minimum, and a kick off its wall can clear it.

    SAM's kick must clear well and probe; LLQR+SAM's, longer by a factor of `1 / lambda_bar`, must stay in the bowl.
    """
    ring = constants.landscape
    kick = constants.lr * ring.well.wall_slope
    holds = ring.well.wall_slope > 1.5 * ring.radius * constants.lambda_bar
    above = ring.well.depth < 0.4 * constants.lambda_bar * ring.radius**2
    clears = kick > 1.2 * (constants.well_radius + constants.rho)
    stays_near = kick / constants.lambda_bar < ring.radius
    return torch.as_tensor(holds & above & clears & stays_near)


def _traps_plain_descent(constants: ToyConstants) -> Tensor:
    """At the bottom of the ring, `eta` times the perceived sharpness stays below 1.8."""
    ring = constants.landscape
    off_centre = ring.bottom(torch.zeros(_count(constants), dtype=torch.float64)).norm(dim=-1) - ring.radius
    hardened = 1 + 3 * constants.hardening * (off_centre / constants.well_radius) ** 2
    return torch.as_tensor(constants.lr * (1 + constants.sharpness * hardened / constants.lambda_bar) < 1.8)


def _jittered(constants: ToyConstants, copies: int, jitter: float, generator: torch.Generator) -> ToyConstants:
    """Each row `copies` times, every constant multiplied by a factor within `1 +- jitter`."""
    copied = _take(constants, torch.arange(_count(constants)).repeat_interleave(copies))
    shape = (len(VARIED), _count(copied))
    factors = 1 + jitter * (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1)
    return replace(copied, **{name: getattr(copied, name) * factors[i] for i, name in enumerate(VARIED)})


def _take(constants: ToyConstants, rows: Tensor) -> ToyConstants:
    """The rows given by indices or by a mask."""
    return replace(constants, **{name: getattr(constants, name)[rows] for name in VARIED})


def _row(constants: ToyConstants, row: int) -> ToyConstants:
    return replace(constants, **{name: float(getattr(constants, name)[row]) for name in VARIED})


def _count(constants: ToyConstants) -> int:
    return len(torch.as_tensor(constants.lambda_bar))


def _three_digits(values: Tensor) -> Tensor:
    """Rounded, so that the printed constants are exactly those that were simulated."""
    scale = 10.0 ** (2 - values.abs().log10().floor())
    return (values * scale).round() / scale


if __name__ == "__main__":
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    for found in search(seed=seed, progress=lambda message: print(message, file=sys.stderr)):
        line = {"worst_path_ratio": found.worst_ratio, "claims_kept_under_jitter": found.robustness}
        print(json.dumps(line | asdict(found.constants)))

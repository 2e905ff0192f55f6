"""The first toy figure: escape from inside the sharp well."""

from dataclasses import replace

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

from llqr.lab.pictures import styled
from llqr.lab.toy.drawing import GREEN, PURPLE, band, method_handles, panels, ring_map, ring_slice, shared_legend
from llqr.lab.toy.experiment import ToyResult, claim_shares, statistics
from llqr.lab.toy.ring import FIGURE_CONSTANTS, ToyRuns, escape
from llqr.theory import METHODS, hovering_envelope
from llqr.theory.trajectories import simulate

RESCALED = "SAM, lr / mean curvature"


def run_escape(anisotropy: float = 1.0, starts: int = 32, steps: int = 1200) -> ToyResult:
    """Escape from inside the sharp well: SGD, LLQR, SAM and LLQR+SAM at one learning rate."""
    constants = replace(FIGURE_CONSTANTS, anisotropy=anisotropy)
    runs = escape(constants, starts, steps)
    claims = claim_shares(runs.escape_claims())
    start = runs.trajectories["sam"].positions[0]
    lr = constants.lr / float(runs.landscape.average_curvature(start).mean())
    sam = simulate("sam", runs.landscape.loss, start, lr=lr, steps=steps, rho=constants.rho)
    rescaled = ToyRuns(constants, {"sam": sam})
    flat = {method: _arrivals(runs.flat_step(method)) for method in ("sam", "llqr+sam")}
    flat[RESCALED] = _arrivals(rescaled.flat_step("sam"))
    decay = {str(method): float(runs.losses(method).mean()) for method in METHODS}
    decay[RESCALED] = float(rescaled.losses("sam").mean())
    return ToyResult(
        {
            "constants": constants, "starts": starts, "steps": steps, "claims": claims,
            "steps_to_flat": flat, "mean_loss": decay,
        },
        {"escape" if anisotropy == 1 else "escape-anisotropic": escape_figure(runs, rescaled)},
    )  # fmt: skip


def _arrivals(steps: Tensor) -> dict[str, float]:
    """Of those starts that reach the flat basin at all; the others have -1."""
    reached = steps[steps >= 0].double()
    return {"count": len(reached)} | (statistics(reached) if len(reached) else {})


@styled
def escape_figure(runs: ToyRuns, rescaled: ToyRuns) -> Figure:
    figure, (slice_, map_, loss) = panels(3)
    rho, bar = float(runs.constants.rho), float(runs.constants.lambda_bar)
    ring_slice(slice_, runs, {"sam": rho, "llqr+sam": float(hovering_envelope(rho, bar))})
    starts = runs.trajectories["sgd"].positions.shape[1]
    ring_map(map_, runs, range(0, starts, max(1, starts // 5)), "some of the starts (stars)")
    for method in METHODS:
        values = runs.losses(method).clamp(min=1e-9).numpy()
        band(loss, values, method)
    loss.plot(
        range(1, len(values) + 1), rescaled.losses("sam").clamp(min=1e-9).quantile(0.5, dim=1), color=PURPLE, lw=1.2
    )
    loss.set(xscale="log", yscale="log", xlabel="step + 1", ylabel="loss above the flat minimum")
    loss.set_title(f"median and range, {values.shape[1]} starts")
    others = {RESCALED: PURPLE, "flat basin": GREEN}
    lines = [Line2D([], [], color=colour, lw=1.2, label=label) for label, colour in others.items()]
    shared_legend(figure, [*method_handles(), *lines])
    return figure

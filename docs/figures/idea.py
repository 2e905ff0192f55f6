"""The picture of the first page: where SAM and LLQR+SAM look, and where they go. `python docs/figures/idea.py`."""

from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse

import llqr
from llqr.lab import pictures

CURVATURE = torch.tensor([1.0, 6.0])
U = 1 / CURVATURE  # shortens the gradient where the loss is steep
START = torch.tensor([-2.6, 0.42])
RHO, LR = 0.55, 0.22
COLOURS = {"SAM": pictures.BLUE, "LLQR+SAM": pictures.ORANGE}


def loss(theta: torch.Tensor) -> torch.Tensor:
    return 0.5 * (CURVATURE * theta**2).sum()


def step(name: str) -> tuple[np.ndarray, np.ndarray]:
    """The probe and the new weights of one step of the library's own optimizer."""
    theta = torch.nn.Parameter(START.clone())
    geometry = llqr.FixedGeometry([(theta, lambda g: U * g)]) if name == "LLQR+SAM" else None
    opt = llqr.SAM(torch.optim.SGD([theta], lr=LR), rho=RHO, norm="metric", geometry=geometry)
    seen = []

    def closure() -> torch.Tensor:
        seen.append(theta.detach().clone().numpy())
        opt.zero_grad()
        value = loss(theta)
        value.backward()
        return value

    opt.step(closure)
    return seen[1], theta.detach().numpy()


@pictures.styled
def draw() -> Figure:
    figure = Figure(figsize=(6.4, 3.5), layout="constrained")
    axes = figure.subplots()
    for level in np.linspace(3.6, 0.3, 12):  # contours of the loss; browsers show seams in faint fills that overlap
        size = [2 * level / float(curvature) ** 0.5 for curvature in CURVATURE]
        axes.add_patch(Ellipse((0, 0), *size, fill=False, edgecolor=pictures.GRID, linewidth=1.0))
    axes.plot(0, 0, "*", color=pictures.GREEN, markersize=16)
    axes.annotate("minimum", (0, 0), (-0.35, -0.42), color=pictures.GREEN, fontsize=11)
    for name, (width, height) in {"SAM": (1.0, 1.0), "LLQR+SAM": tuple(U.sqrt().tolist())}.items():
        probe, end = step(name)
        colour = COLOURS[name]
        size = (2 * RHO * width, 2 * RHO * height)
        axes.add_patch(Ellipse(tuple(START.tolist()), *size, fill=False, linestyle=":", color=colour, linewidth=1.5))
        axes.annotate("", probe, START.tolist(), arrowprops={"arrowstyle": "->", "color": colour, "linestyle": "--"})
        axes.plot(*probe, "o", color=colour, markersize=6)
        arrow = {"arrowstyle": "-|>", "color": colour, "linewidth": 2.5}
        axes.annotate("", end, START.tolist(), arrowprops=arrow)
    axes.plot(*START.tolist(), "o", color=pictures.INK, markersize=8)
    axes.annotate("weights", START.tolist(), (-1.97, 0.68), fontsize=11)
    axes.annotate("SAM: probe on a circle,\nstep across the valley", (-2.0, 1.05), color=COLOURS["SAM"], fontsize=11)
    axes.annotate(
        "LLQR+SAM: probe on an ellipse that the\nmetric shapes, shorter step along the valley",
        (-4.0, -1.5),
        color=COLOURS["LLQR+SAM"],
        fontsize=11,
    )
    axes.set(xlim=(-4.1, 1.4), ylim=(-1.6, 1.5), aspect="equal")
    axes.set_axis_off()
    return figure


def main() -> None:
    title = "One step of SAM and one of LLQR+SAM in a narrow valley"
    pictures.save(draw(), Path(__file__).with_suffix(".svg"), title)


if __name__ == "__main__":
    main()

"""A pothole on a slope: with the same radius, SAM stays in the well and LLQR+SAM leaves it.

The well is sharp and narrow, the landscape around it flat (average curvature 1/4). SAM's probe has length `rho`,
LLQR+SAM's `rho / sqrt(lambda_bar)`, twice as much: the radius of the well lies between the two.
"""

import numpy as np
import torch

from llqr.theory import METHODS, Pothole, PotholeOnSlope, hovering_envelope, simulate

LAMBDA_BAR, R_EPS, RHO = 0.25, 1.0, 0.65


def main() -> None:
    landscape = PotholeOnSlope(LAMBDA_BAR, tilt=1.6, well=Pothole(sharpness=20.0, radius=R_EPS, edge=0.05))
    start = torch.tensor([[landscape.minimum + 0.01]], dtype=torch.float64)
    print(f"well radius {R_EPS}, envelopes: SAM {RHO:.2f}, ", end="")
    print(f"LLQR+SAM {float(hovering_envelope(RHO, LAMBDA_BAR)):.2f}")
    for method in METHODS:
        run = simulate(method, landscape.loss, start, lr=0.005, rho=RHO, steps=400, metric=landscape.metric)
        left = int(run.first(lambda x: x.squeeze(-1).abs() > R_EPS))
        ending = float(run.positions[-1])
        verdict = f"leaves at step {left}" if left >= 0 else "stays in the well"
        print(f"{method:>8}: {verdict}, ends at {np.round(ending, 2):+.2f}")


if __name__ == "__main__":
    main()

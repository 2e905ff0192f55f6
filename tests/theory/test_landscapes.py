"""The toy landscapes: continuously differentiable, with the minima they document."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llqr.lab.toy.ring import FIGURE_CONSTANTS, RingLandscape
from llqr.theory import Pothole, PotholeOnSlope

wells = st.builds(
    Pothole,
    sharpness=st.floats(0.1, 50),
    radius=st.floats(0.1, 2),
    hardening=st.floats(0, 40),
    edge=st.floats(0.02, 0.9),
)


@given(well=wells)
def test_a_pothole_is_continuously_differentiable_and_local(well):
    z = torch.linspace(-1.5 * well.radius, 1.5 * well.radius, 2001, dtype=torch.float64, requires_grad=True)
    loss = well.loss(z)
    (gradient,) = torch.autograd.grad(loss.sum(), z)
    torch.testing.assert_close(gradient, well.slope(z.detach()), rtol=1e-9, atol=1e-9 * well.wall_slope)
    # No jump of the loss or of its slope between neighbours: both are Lipschitz with these constants.
    spacing = float((z[1] - z[0]).detach())
    steepest = max(well.sharpness * (1 + 3 * well.hardening), well.wall_slope / (well.radius - well.core))
    assert float(loss.detach().diff().abs().max()) <= 1.0001 * well.wall_slope * spacing
    assert float(gradient.diff().abs().max()) <= 1.0001 * steepest * spacing
    outside = z.detach().abs() >= well.radius
    assert (loss.detach()[outside] == 0).all()
    assert (gradient[outside] == 0).all()
    centre = well.loss(torch.zeros(1, dtype=torch.float64))
    torch.testing.assert_close(centre, torch.tensor([-well.depth], dtype=torch.float64))


def test_without_hardening_the_core_is_the_quadratic_model():
    well = Pothole(3.0, 0.5, edge=0.2)
    z = torch.linspace(-0.4, 0.4, 11, dtype=torch.float64)
    torch.testing.assert_close(well.loss(z) + well.depth, 1.5 * z**2, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("curvature", [(0.5, 0.5), (0.5, 1.0)])
@pytest.mark.parametrize("angle", [0.0, 0.8, 2.5])
def test_the_bottom_of_the_ring(curvature, angle):
    ring = RingLandscape(curvature, FIGURE_CONSTANTS.landscape.well)
    bottom = ring.bottom(angle)
    r = bottom.norm().clone().requires_grad_()
    (slope,) = torch.autograd.grad(ring.along_ray(r, angle), r)
    assert abs(float(slope)) < 1e-12 * ring.well.wall_slope
    assert bool(ring.in_well(bottom))
    assert abs(float(bottom.norm()) - 5) < 0.2
    around = torch.linspace(-0.1, 0.1, 21, dtype=torch.float64) + bottom.norm()
    assert (ring.along_ray(around, angle) >= ring.loss(bottom)).all()


def test_the_flat_basin_is_lower_than_the_ring_and_flatter():
    ring = FIGURE_CONSTANTS.landscape
    hessian = torch.func.hessian(lambda theta: ring.loss(theta))
    flat, sharp = (torch.linalg.eigvalsh(hessian(p)) for p in (torch.full((2,), 1e-3).double(), ring.bottom(0.8)))
    assert float(ring.loss(torch.zeros(2).double())) == 0 < float(ring.loss(ring.bottom(0.8)))
    assert float(sharp[-1]) > 50 * float(flat[-1])


def test_the_metric_is_the_bowl_and_not_the_well():
    ring = RingLandscape((0.5, 2.0), FIGURE_CONSTANTS.landscape.well)
    assert ring.metric(torch.tensor([[1.0, 1.0]]).double()).tolist() == [[2.0, 0.5]]


def test_a_pothole_on_a_slope_has_its_minimum_as_documented():
    landscape = PotholeOnSlope(torch.tensor([0.5, 2.0]).double(), 1.0, Pothole(20.0, 1.0))
    x = landscape.minimum.unsqueeze(-1).requires_grad_()
    (slope,) = torch.autograd.grad(landscape.loss(x).sum(), x)
    assert float(slope.abs().max()) < 1e-14


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sharpness": 0.0}, "sharpness must be positive"),
        ({"radius": -1.0}, "radius must be positive"),
        ({"hardening": -1.0}, "hardening must be at least 0"),
        ({"edge": 1.0}, "edge must be between 0 and 1"),
    ],
)
def test_bad_wells_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        Pothole(**({"sharpness": 1.0, "radius": 1.0} | arguments))


def test_a_well_without_a_minimum_is_refused():
    with pytest.raises(ValueError, match="the well has no minimum"):
        RingLandscape((1.0, 1.0), Pothole(1.0, 0.1)).bottom()

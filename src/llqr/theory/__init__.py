"""The two-scale pothole model of the paper's analysis: closed forms, toy landscapes, and simulations."""

from llqr.theory.envelopes import (
    amplification,
    escapes,
    hovering_envelope,
    perceived_sharpness,
    probe_reach,
    scalar_step,
    two_cycle_amplitude,
    vanilla_two_cycle_amplitude,
)
from llqr.theory.landscapes import Pothole, PotholeOnSlope, RingLandscape
from llqr.theory.noise_damping import one_step_motion, simulate_mode, stationary_variance
from llqr.theory.phase import PhaseDiagram, PhaseSettings, escape_diagram, finite_rate_envelope, rate_diagram
from llqr.theory.selection import Selection, flat_exit_lower_bound, occupation, select, sharp_exit_upper_bound
from llqr.theory.trajectories import METHODS, Hovering, Method, Trajectory, hover, iterate, simulate
from llqr.theory.two_scale import TwoScale, roll

__all__ = [
    "METHODS",
    "Hovering",
    "Method",
    "PhaseDiagram",
    "PhaseSettings",
    "Pothole",
    "PotholeOnSlope",
    "RingLandscape",
    "Selection",
    "Trajectory",
    "TwoScale",
    "amplification",
    "escape_diagram",
    "escapes",
    "finite_rate_envelope",
    "flat_exit_lower_bound",
    "hover",
    "hovering_envelope",
    "iterate",
    "occupation",
    "one_step_motion",
    "perceived_sharpness",
    "probe_reach",
    "rate_diagram",
    "roll",
    "scalar_step",
    "select",
    "sharp_exit_upper_bound",
    "simulate",
    "simulate_mode",
    "stationary_variance",
    "two_cycle_amplitude",
    "vanilla_two_cycle_amplitude",
]

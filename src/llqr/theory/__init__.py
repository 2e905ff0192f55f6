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
from llqr.theory.landscapes import Pothole, PotholeOnSlope
from llqr.theory.noise_damping import one_step_motion, stationary_variance
from llqr.theory.selection import flat_exit_lower_bound, occupation, sharp_exit_upper_bound
from llqr.theory.trajectories import METHODS, Method, Trajectory, iterate, simulate
from llqr.theory.two_scale import TwoScale, roll

__all__ = [
    "METHODS",
    "Method",
    "Pothole",
    "PotholeOnSlope",
    "Trajectory",
    "TwoScale",
    "amplification",
    "escapes",
    "flat_exit_lower_bound",
    "hovering_envelope",
    "iterate",
    "occupation",
    "one_step_motion",
    "perceived_sharpness",
    "probe_reach",
    "roll",
    "scalar_step",
    "sharp_exit_upper_bound",
    "simulate",
    "stationary_variance",
    "two_cycle_amplitude",
    "vanilla_two_cycle_amplitude",
]

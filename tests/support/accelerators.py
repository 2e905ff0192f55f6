"""Accelerate's classes share what they know within a process; every test begins without it."""

from accelerate.state import AcceleratorState, GradientState, PartialState


def forget_accelerators():
    for shared in (PartialState, AcceleratorState, GradientState):
        shared._reset_state()

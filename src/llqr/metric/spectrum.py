"""Projections that keep the spectrum of every matrix of a stack inside an interval."""

from __future__ import annotations

import torch
from torch import Tensor


def clamp_singular_values(stack: Tensor, lower: float, upper: float) -> Tensor:
    """Project every matrix of a stack onto those with singular values in `[lower, upper]`."""
    left, values, right = torch.linalg.svd(_at_least_float32(stack), full_matrices=False)
    projected: Tensor = (left * values.clamp(lower, upper).unsqueeze(-2)) @ right
    return projected.to(stack.dtype)


def clamp_eigenvalues(stack: Tensor, lower: float, upper: float) -> Tensor:
    """Project every matrix of a stack onto the symmetric ones with eigenvalues in `[lower, upper]`."""
    wide = _at_least_float32(stack)
    values, vectors = torch.linalg.eigh(0.5 * (wide + wide.mT))
    projected: Tensor = (vectors * values.clamp(lower, upper).unsqueeze(-2)) @ vectors.mT
    return projected.to(stack.dtype)


def _at_least_float32(stack: Tensor) -> Tensor:
    return stack.float() if stack.dtype.itemsize < 4 else stack

"""How a refresh is computed: what decides its speed and its memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from llqr.curvature.derivatives import ENGINES
from llqr.metric.layout import MAX_SIDE


@dataclass(frozen=True)
class Runtime:
    """How a refresh and `U g` are computed. What is learned does not depend on it, up to rounding.

    Attributes:
        engine: what multiplies by H: "auto", "forward", "double-backward", "finite-differences",
            "one-sided-differences" or "linearised". Each of them gathers the whole weights that FSDP2 has sharded.
        capture: replay refreshes, and the matrix products of U g, as CUDA graphs: few launches from the host. Needs a
            CUDA model and batches of one shape, and keeps the memory of both, with a copy of the factors; each U g
            overwrites the one before.
        compile: hand the traced product (of engine="linearised"), and the inner steps on large stacks of matrices, to
            torch.compile.
        spread: share the products of a refresh evenly among the optimizer steps until the next one is due, so that no
            step is long. It is linearised at once, at copies of the weights and buffers, and U changes at its end;
            until the first one ends, U is the identity. The copies and the activations of the inner batch stay in
            memory between the steps.
        autocast: run a refresh under autocast of this dtype (default: full precision, whatever the caller's context);
            the factors' matrix products too, unless it is float16, which is too narrow for gradients.
        micro_batch: compute a refresh in pieces of this many samples: the same result with less memory.
        dtype: what the factors are held in (default: the parameter's, at least float32).
        apply_dtype: what the matrix products of U g are computed in (default: what the factors are held in).
        max_side: blocks with a factor side above this fall back to a cheaper structure, with a warning.
        max_failures: rejected refreshes in a row before an error.
        process_group: the ranks that learn one metric together, each on its own batch (default: those of the DDP
            wrapper around the model; without one, every process learns its own).

    Example:
        >>> Runtime(micro_batch=32).engine
        'auto'
    """

    engine: str = "auto"
    capture: bool = False
    compile: bool = False
    spread: bool = False
    autocast: torch.dtype | None = None
    micro_batch: int | None = None
    dtype: torch.dtype | None = None
    apply_dtype: torch.dtype | None = None
    max_side: int = MAX_SIDE
    max_failures: int = 10
    process_group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.engine, str) or self.engine not in ("auto", *ENGINES):
            raise ValueError(f"engine: unknown {self.engine!r}; choose auto or one of {', '.join(ENGINES)}")
        for name in ("capture", "compile", "spread"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}: expected True or False, got {getattr(self, name)!r}")
        for name in ("autocast", "dtype", "apply_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not isinstance(dtype, torch.dtype):
                raise TypeError(f"{name}: expected a torch.dtype, such as torch.float32, got {dtype!r}")
        for name in ("max_side", "max_failures", "micro_batch"):
            number = getattr(self, name)
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
                kind = "a positive number of samples" if name == "micro_batch" else "a whole number of at least 1"
                raise ValueError(f"{name}: expected {kind}, got {number!r}")
        if self.micro_batch is not None:
            if self.engine == "linearised":
                raise ValueError(
                    f"micro_batch: not with engine={self.engine!r}, which keeps a whole batch's activations"
                )
            if self.capture:
                raise ValueError("capture: not with micro_batch")

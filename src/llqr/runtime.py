"""How a refresh is computed: what decides its speed and its memory."""

from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist

from llqr.checks import check_runtime
from llqr.curvature.derivatives import ENGINES
from llqr.metric.structures import MAX_SIDE


@dataclass(frozen=True)
class Runtime:
    """How a refresh and `U g` are computed.

    `max_side` and `process_group` change what is learned; anything else does so only by rounding, or by the error of an
    approximate engine.

    Attributes:
        engine: what multiplies by H: "auto", "forward", "double-backward", "finite-differences",
            "one-sided-differences" or "linearised". Each of them gathers the whole weights that FSDP2 has sharded.
        capture: replay refreshes, and the matrix products of U g, as CUDA graphs: few launches from the host. Needs a
            CUDA model and batches of one shape, and keeps the memory of both; each U g overwrites the one before.
        compile: hand the traced product (of engine="linearised") to torch.compile.
        autocast: run a refresh under autocast of this dtype (default: full precision, whatever the caller's context);
            the factors' matrix products too, unless it is float16, which is too narrow for gradients.
        micro_batch: compute a refresh in pieces of this many samples, which the first dimension of the inputs must
            count: the same result with less memory.
        dtype: what the factors are held in (default: the parameter's, at least float32).
        apply_dtype: what the matrix products of U g are computed in (default: what the factors are held in).
        max_side: blocks with a factor side above this fall back to a cheaper structure, with a warning.
        max_failures: rejected refreshes in a row before an error.
        process_group: the ranks that learn one metric together, each on its own batch (default: those of the DDP
            wrapper around the model; without one, every process learns its own). With FSDP2 always those of its mesh.

    Example:
        >>> Runtime(micro_batch=32).engine
        'auto'
    """

    engine: str = "auto"
    capture: bool = False
    compile: bool = False
    autocast: torch.dtype | None = None
    micro_batch: int | None = None
    dtype: torch.dtype | None = None
    apply_dtype: torch.dtype | None = None
    max_side: int = MAX_SIDE
    max_failures: int = 10
    process_group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        check_runtime(self, ENGINES)

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Nothing in it changes, and a process group cannot be copied."""
        return self

"""The tables of a recipe as dataclasses: each one checks itself and builds what it describes."""

import inspect
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from llqr import STRUCTURES, Geometry, Inner, Metric, Runtime
from llqr.curvature import Loss
from llqr.curvature.divergence import DIVERGENCES
from llqr.lab.names import check_known
from llqr.metric.structure import Bounds
from llqr.metric.structures import requested
from llqr.probes import PROBES, SAMProbe
from llqr.schedule import check_number

BASES: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
SET_ELSEWHERE = {
    "capture": "--capture",
    "compile": "--compile",
    "autocast": "training.precision",
    "process_group": "a training script of your own",
}
"""Options of `llqr.Runtime` that a recipe does not have, and where they come from instead."""
LARGEST = torch.finfo(torch.float32).max
"""Weights and factors are at least in float32, which cannot be multiplied by more."""


@dataclass(frozen=True)
class Choice:
    """A task or a model: its name and its own options."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DataChoice(Choice):
    """A data set, and the folder in which it is found."""

    root: str = "data"


@dataclass(frozen=True)
class Base:
    """A base optimizer."""

    name: Literal["sgd", "adam", "adamw"]
    lr: float
    weight_decay: float
    momentum: float = 0.0
    nesterov: bool = False
    betas: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay", "momentum"):
            check_number(name, getattr(self, name), 0, LARGEST)
        if self.name != "sgd" and (self.momentum or self.nesterov):
            raise ValueError(f"momentum and nesterov belong to sgd, got them with {self.name}.")
        if self.name == "sgd" and self.betas is not None:
            raise ValueError("betas belong to adam and adamw, got them with sgd.")
        self.build(nn.Linear(1, 1))  # refuses what torch does not take

    def build(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of a model's parameters, as one fused kernel per step where the device has one."""
        options: dict[str, Any] = {"lr": self.lr, "weight_decay": self.weight_decay}
        if self.name == "sgd":
            options |= {"momentum": self.momentum, "nesterov": self.nesterov}
        if self.betas is not None:
            options["betas"] = self.betas
        if next(model.parameters()).device.type == "cuda":
            options["fused"] = True
        return BASES[self.name](model.parameters(), **options)


@dataclass(frozen=True)
class OptimizerSettings:
    """What `llqr.Optimizer` does in the two passes of a step: its arguments under their own names."""

    same_dropout: bool = True
    buffers: Literal["centre", "probe"] = "centre"


@dataclass(frozen=True)
class LrSchedule:
    """How the learning rate changes from step to step: linearly up during the warm-up, then as ``name`` says.

    ``inverse-sqrt`` falls as ``sqrt(warmup_steps / step)``, whatever the length of the run. ``steps`` multiplies by
    ``decay`` at each of ``milestones``, which are fractions of the run.
    """

    name: Literal["cosine", "constant", "inverse-sqrt", "steps"]
    warmup_steps: int = 0
    milestones: tuple[float, ...] = ()
    decay: float = 0.1

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must not be negative, got {self.warmup_steps}.")
        if self.name == "inverse-sqrt" and self.warmup_steps < 1:
            raise ValueError("warmup_steps must be at least 1 with inverse-sqrt, which decays after the warm-up.")
        if (self.name == "steps") != bool(self.milestones):
            raise ValueError("milestones belong to steps, which needs at least one.")
        if not all(0 < milestone < 1 for milestone in self.milestones):
            raise ValueError(f"milestones must be fractions of the run in (0, 1), got {list(self.milestones)}.")

    def factor(self, step: int, total: int) -> float:
        """What the base learning rate is multiplied by at ``step`` of ``total``, counted from 0."""
        warmup = self.warmup_steps
        if step < warmup:
            return (step + 1) / warmup
        if self.name == "constant":
            return 1.0
        if self.name == "inverse-sqrt":
            return math.sqrt(warmup / (step + 1))
        if self.name == "steps":
            return self.decay ** sum(step >= milestone * total for milestone in self.milestones)
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """The length of a run, the sizes of its batches, and its precision.

    The length is given in ``epochs`` or in ``steps``. The model is evaluated after every epoch, or every
    ``evaluate_every`` steps, and always at the end. ``batch_size`` counts samples; in translation, padded tokens.
    """

    epochs: int | None = None
    steps: int | None = None
    batch_size: int
    eval_batch_size: int
    evaluate_every: int | None = None
    last: Literal["fill", "drop", "keep"] = "fill"
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    channels_last: bool = False

    def __post_init__(self) -> None:
        for name in ("epochs", "steps", "batch_size", "eval_batch_size", "evaluate_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(f"epochs or steps must be given, and not both, got {self.epochs} and {self.steps}.")

    def total_steps(self, steps_per_epoch: int) -> int:
        """The length of the run in steps."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return self.epochs * steps_per_epoch

    @property
    def counted_in(self) -> Literal["epoch", "step"]:
        """The unit in which progress is counted."""
        return "step" if self.steps or self.evaluate_every else "epoch"


@dataclass(frozen=True)
class Probe:
    """A probe by its name in `llqr.probes.PROBES`; which settings it takes is read from its class."""

    kind: str
    rho: float
    eta: float | None = None
    lam: float | None = None
    norm: str | None = None
    start_after: int = 0
    every: int | None = None

    def __post_init__(self) -> None:
        check_known("kind", self.kind, PROBES)
        for name in self.arguments():
            if name not in inspect.signature(PROBES[self.kind]).parameters:
                raise ValueError(f"{name} is no setting of {self.kind}.")
        self.build()  # refuses what the library does not take

    def arguments(self) -> dict[str, Any]:
        """The settings that were made, without the name."""
        others = ("kind",) if self.start_after else ("kind", "start_after")
        return {name: value for name, value in vars(self).items() if name not in others and value is not None}

    def build(self) -> SAMProbe:
        return PROBES[self.kind](**self.arguments())


class PartialGeometry(Geometry):
    """A control: of what ``U`` does to the gradient of each parameter, only the length or only the direction."""

    part: Literal["lengths", "directions"]

    def transport(self, parameters: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
        """``g |Ug| / |g|`` or ``Ug |g| / |Ug|``, parameter by parameter."""
        moved = super().transport(parameters, grads)
        pair = (list(grads), moved) if self.part == "lengths" else (moved, list(grads))
        kept, wanted = (torch._foreach_norm(tensors) for tensors in pair)
        scales = [length / own.clamp_min(torch.finfo(own.dtype).tiny) for own, length in zip(kept, wanted, strict=True)]
        return list(torch._foreach_mul(pair[0], scales))


@dataclass(frozen=True, kw_only=True)
class GeometrySettings:
    """How the metric is stored, learned and refreshed: the arguments of `llqr.Geometry` under their own names.

    ``structure`` is one name for all blocks, or a table from patterns of parameter names to structures. The inner batch
    has ``batch_size`` samples. ``part`` makes it a `PartialGeometry`.
    """

    divergence: str
    structure: str | dict[str, str]
    every: int
    ema: float
    batch_size: int
    damping: float | str = 0.0
    bounds: Bounds = None
    part: Literal["lengths", "directions"] | None = None
    inner: Inner = field(default_factory=Inner)
    runtime: Runtime = field(default_factory=Runtime)

    def __post_init__(self) -> None:
        check_known("divergence", self.divergence, DIVERGENCES)
        for kind in [self.structure] if isinstance(self.structure, str) else self.structure.values():
            check_known("structure", kind, STRUCTURES)
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}.")
        inner = {f"inner.{name}": getattr(self.inner, name) for name in ("lr", "curvature_scale")}
        for name, number in (inner | {"damping": self.damping}).items():
            if isinstance(number, float) and not abs(number) <= LARGEST:
                raise ValueError(f"{name} must be at most {LARGEST:.3g}, got {number}.")
        for name, place in SET_ELSEWHERE.items():
            if getattr(self.runtime, name) != getattr(Runtime, name):
                raise ValueError(f"runtime.{name} cannot be set in a recipe; it comes from {place}.")
        # Patterns match the names of the network itself, which the recipe checks.
        patterns = {} if isinstance(self.structure, str) else {"structure": "diagonal"}
        with warnings.catch_warnings(action="ignore"):  # about a network too small for anything
            # Refuses what the library does not take.
            self.build(nn.Linear(2, 2), nn.functional.cross_entropy, **patterns)

    def build(self, model: nn.Module, loss: Loss, **arguments: Any) -> Geometry:
        """The geometry of a model; ``arguments`` are those that these settings do not have, or come before them."""
        own = ("structure", "divergence", "every", "ema", "damping", "bounds", "inner", "runtime")
        arguments = {name: getattr(self, name) for name in own} | arguments
        if self.part is None:
            return Geometry(model, loss, **arguments)
        geometry = PartialGeometry(model, loss, **arguments)
        geometry.part = self.part
        return geometry

    def metric(self, model: nn.Module) -> Metric:
        """An unlearned metric as these settings lay it out, for its size."""
        return self.build(model, nn.functional.cross_entropy).metric

    def fallbacks(self, metric: Metric) -> dict[str, str]:
        """The matrices whose factors would be too large, and how they are stored instead of as ``structure`` says."""
        return {
            f"{block.name} {block.shape}": metric.kinds[block.name]
            for block in metric.blocks
            if block.is_matrix and metric.kinds[block.name] != requested(block, self.structure)
        }

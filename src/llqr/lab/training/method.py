"""From the settings of a run to its optimizer and its learning rate."""

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

import llqr
from llqr.curvature.engines import ENGINES
from llqr.lab.config.recipe import Base, LrSchedule, Run
from llqr.lab.tasks import Task
from llqr.lab.training.compiling import repeated_blocks

BASES = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


class ObservedGeometry(llqr.Geometry):
    """A geometry that keeps what every refresh reported until it is collected."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._reports: list[llqr.Refresh] = []

    def finished(self, report: llqr.Refresh) -> None:
        self._reports.append(report)

    def collect(self) -> list[llqr.Refresh]:
        """The reports since the last call."""
        reports, self._reports = self._reports, []
        return reports


def optimizer_for(
    run: Run, model: nn.Module, task: Task, *, capture: bool = False, compile: bool = False
) -> llqr.Optimizer:
    """The method of a run, put together from its components, whatever the recipe calls it.

    With ``capture`` a refresh is replayed as CUDA graphs, with ``compile`` it runs compiled, unless it is computed in
    pieces. It runs in the precision of the passes.
    """
    base = base_optimizer(run.base, model)
    geometry = None
    if run.geometry is not None:
        whole = run.geometry.micro_batch is None
        engine = run.geometry.engine
        if engine is None and compile and whole:
            # Differences run through the blocks that are compiled for the passes; a network without any is traced.
            engine = "one-sided-differences" if repeated_blocks(model) else "linearised"
        first_order = engine in ENGINES and ENGINES[engine].first_order
        # Differences need no derivative of the passes' own kernels.
        forward = task.forward if first_order else task.differentiable_forward
        autocast = torch.bfloat16 if run.training.precision == "bf16" else None
        how = {"forward": forward, "capture": capture and whole, "compile": compile, "autocast": autocast}
        settings = run.geometry.arguments() | how
        if engine is not None:
            settings["engine"] = engine
        geometry = ObservedGeometry(model, task.loss, **settings)
    name = "" if geometry is None else "llqr" if run.transport else "llqr-probe-only"
    if run.probe is not None:
        name = f"{name}+{run.probe.kind}" if name else run.probe.kind
    probe = {} if run.probe is None else run.probe.arguments()
    return llqr.build(name or "sgdm", base, geometry=geometry, model=model, **probe)


def fallbacks(metric: llqr.Metric, structure: str | Mapping[str, str]) -> dict[str, str]:
    """The matrices whose factors would be too large, and how they are stored instead of as ``structure`` says."""
    rules = {"*": structure} if isinstance(structure, str) else structure
    found = {}
    for block in metric.blocks:
        asked = next(kind for pattern, kind in rules.items() if fnmatchcase(block.parameter, pattern))
        if block.is_matrix and metric.kinds[block.name] != asked:
            found[f"{block.name} {block.shape}"] = metric.kinds[block.name]
    return found


def base_optimizer(base: Base, model: nn.Module) -> torch.optim.Optimizer:
    """The base optimizer, in one kernel a step where the device has one."""
    options: dict[str, Any] = {"lr": base.lr, "weight_decay": base.weight_decay}
    if base.name == "sgd":
        options |= {"momentum": base.momentum, "nesterov": base.nesterov}
    if base.betas is not None:
        options["betas"] = base.betas
    if next(model.parameters()).device.type == "cuda":
        options["fused"] = True
    return BASES[base.name](model.parameters(), **options)


def lr_factor(schedule: LrSchedule, step: int, total: int) -> float:
    """What the base learning rate is multiplied by at ``step`` of ``total``, counted from 0."""
    warmup = schedule.warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "inverse-sqrt":
        return math.sqrt(warmup / (step + 1))
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))

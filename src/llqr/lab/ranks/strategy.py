"""How a model is trained by several processes: on copies (DDP), or on shards (FSDP2).

Every rank draws the same batches and takes its share of each, so that a run does not depend on the number of ranks but
for rounding, and a checkpoint, which is one file of whole tensors, is resumed on any number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

import llqr
from llqr.lab.errors import ConfigurationError
from llqr.lab.ranks.shared_pass import SharedPass, share
from llqr.lab.ranks.team import Ranks, Team
from llqr.lab.tasks import Batch, Task
from llqr.lab.training.captured_pass import Pass
from llqr.lab.training.precision import Precision
from llqr.step.saved_state import taken_apart

T = TypeVar("T")


class Strategy:
    """One process: nothing is shared out."""

    name: str | None = None
    group: dist.ProcessGroup | None = None

    def __init__(self) -> None:
        self.team: Team = Team()

    def prepare(self, model: nn.Module) -> nn.Module:
        """The model whose parameters an optimizer is made for."""
        return model

    def closure(self, task: Task, model: nn.Module, precision: Precision) -> Pass:
        return Pass(task, model, precision)

    def share(self, batch: Batch) -> Batch:
        """This rank's part of a batch."""
        return batch

    def measured(self, action: Callable[[], T]) -> T:
        """What an evaluation finds."""
        return action()

    def optimizer_state(self, optimizer: llqr.Optimizer) -> Mapping[str, Any]:
        """The whole state, whichever rank has it."""
        return optimizer.state_dict()


class DDP(Strategy):
    """A copy of the model on every rank, which averages the gradients with the others."""

    name = "ddp"

    def __init__(self) -> None:
        ranks = Ranks()
        self.team, self.group = ranks, ranks.group

    def prepare(self, model: nn.Module) -> nn.Module:
        """BatchNorm takes its statistics over the whole batch, as in one process."""
        if not any(isinstance(module, _BatchNorm) for module in model.modules()):
            return model
        if next(model.parameters()).device.type != "cuda":
            raise ConfigurationError(
                "--strategy: the network has BatchNorm, whose statistics several ranks share only on CUDA devices "
                "(torch.nn.SyncBatchNorm); train it on one process, or with --device cuda."
            )
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model, self.group)
        return converted

    def closure(self, task: Task, model: nn.Module, precision: Precision) -> Pass:
        return SharedPass(task, DistributedDataParallel(model, process_group=self.group), precision, self.team)

    def share(self, batch: Batch) -> Batch:
        return share(batch, self.team)

    def measured(self, action: Callable[[], T]) -> T:
        """By the first rank: the others have the same weights and would find the same."""
        return self.team.by_first(action)

    def optimizer_state(self, optimizer: llqr.Optimizer) -> Mapping[str, Any]:
        geometry = optimizer.geometry
        if not isinstance(geometry, llqr.Geometry) or geometry.shards == 1:
            return optimizer.state_dict()
        base, own = taken_apart(optimizer.state_dict())
        assert own is not None
        metric = own["geometry"]["metric"]
        on_host: dict[str, Tensor] = {name: factor.cpu() for name, factor in metric["factors"].items()}
        factors = {name: factor for part in self.team.gathered(on_host) for name, factor in part.items()}
        return base | {"llqr": {**own, "geometry": {**own["geometry"], "metric": {**metric, "factors": factors}}}}


STRATEGIES: dict[str, type[Strategy]] = {"ddp": DDP}

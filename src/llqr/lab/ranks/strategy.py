"""How a model is trained by several processes: on copies (DDP), or on shards (FSDP2).

Every rank draws the same batches and takes its share of each, so that up to rounding a run does not depend on the
number of ranks. A checkpoint is one file of whole tensors, and can be resumed on any number of them.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

import llqr
from llqr.curvature.batch import counted_terms, samples_in, taken_rows
from llqr.distributed.dtensors import as_sharded, drop_gathered, local, local_like, whole
from llqr.lab.errors import ConfigurationError
from llqr.lab.passes import Pass, Precision, repeated_blocks
from llqr.lab.ranks.team import Team
from llqr.lab.tasks.task import Batch, Task
from llqr.state import taken_apart

T = TypeVar("T")


def share(batch: Batch, team: Team) -> Batch:
    """Every n-th sample, for n ranks: shares differ by at most one sample, and padding at the end is spread evenly."""
    samples = samples_in(batch) or 0
    if samples < team.size:
        raise ConfigurationError(
            f"--strategy: a batch of {samples} samples cannot be shared out among {team.size} ranks; start fewer "
            "processes, or choose larger batches (and training.last)."
        )
    return taken_rows(batch, slice(team.rank, None, team.size))


class SharedPass(Pass):
    """Loss and gradients of this rank's share of the batch that was loaded last.

    The loss of a share is weighted by the number of terms that its mean is taken over, so that the mean of the ranks is
    that of the whole batch, also where shares or the padding in them differ.
    """

    def __init__(self, task: Task, model: nn.Module, precision: Precision, team: Team) -> None:
        super().__init__(task, model, precision)
        self._team = team
        self._weight: Tensor | float = 1.0

    def load(self, batch: Batch) -> None:
        own = share(batch, self._team)
        super().load(own)
        self._weight = self._team.size * self._terms(own) / self._terms(batch)

    def _terms(self, batch: Batch) -> Tensor | float:
        counted = counted_terms(self._task.loss, batch[1])
        return float(samples_in(batch) or 0) if counted is None else counted.double()

    def _weighted(self, loss: Tensor) -> Tensor:
        weight = torch.as_tensor(self._weight, device=loss.device).to(loss.dtype)
        # A share that is all padding has no loss of its own: a mean over nothing.
        return torch.where(weight > 0, loss * weight, torch.zeros_like(loss))


class Strategy:
    """A copy of the model on every rank of a team; a team of one trains as usual.

    Gradients, BatchNorm and the metric are those of the whole batch.
    """

    shards: Literal["all"] | None = None
    """Among how many ranks to share out a metric, unless the command says otherwise."""

    def __init__(self, name: str | None = None, team: Team | None = None) -> None:
        self.name, self.team = name, team or Team()

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that learn one metric together, if the model itself does not tell."""
        return self.team.group

    def prepare(self, model: nn.Module) -> nn.Module:
        """The model whose parameters an optimizer is made for."""
        if self.team.group is None or not any(isinstance(module, _BatchNorm) for module in model.modules()):
            return model
        if next(model.parameters()).device.type != "cuda":
            raise ConfigurationError(
                "--strategy: the network has BatchNorm, whose statistics several ranks share only on CUDA devices "
                "(torch.nn.SyncBatchNorm); train it on one process, or with --device cuda."
            )
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model, self.team.group)
        return converted

    def closure(self, task: Task, model: nn.Module, precision: Precision) -> Pass:
        if self.team.group is None:
            return Pass(task, model, precision)
        return SharedPass(task, DistributedDataParallel(model, process_group=self.group), precision, self.team)

    def share(self, batch: Batch) -> Batch:
        """This rank's part of a batch."""
        return batch if self.team.group is None else share(batch, self.team)

    def measured(self, model: nn.Module, action: Callable[[], T]) -> T:
        """What an evaluation finds on the first rank: the others have the same weights and would find the same."""
        return self.team.by_first(action)

    # -- whole tensors, whichever rank has them ------------------------------------------------------------------------

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        return model.state_dict()

    def load_weights(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        model.load_state_dict(weights)

    def optimizer_state(self, optimizer: llqr.Optimizer) -> Mapping[str, Any]:
        """With the parts of a metric that is shared out joined together."""
        geometry = optimizer.geometry
        if not isinstance(geometry, llqr.Geometry) or geometry.metric.whole is geometry.metric:
            return optimizer.state_dict()
        base, own = taken_apart(optimizer.state_dict())
        assert own is not None
        metric = own["geometry"]["metric"]
        on_host: dict[str, Tensor] = {name: factor.cpu() for name, factor in metric["factors"].items()}
        factors = {name: factor for part in self.team.gathered(on_host) for name, factor in part.items()}
        return base | {"llqr": {**own, "geometry": {**own["geometry"], "metric": {**metric, "factors": factors}}}}

    def load_optimizer(self, optimizer: llqr.Optimizer, state: Mapping[str, Any]) -> None:
        optimizer.load_state_dict(state)


class FSDP2(Strategy):
    """A shard of the weights, of the optimizer's state and of the metric on every rank."""

    shards = "all"

    @property
    def group(self) -> None:
        """The sharded model tells."""
        return None

    def prepare(self, model: nn.Module) -> nn.Module:
        """Blocks that repeat are gathered one at a time, the rest of the model together."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = super().prepare(model)
        mesh = init_device_mesh(next(model.parameters()).device.type, (self.team.size,))
        for block in repeated_blocks(model):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    def closure(self, task: Task, model: nn.Module, precision: Precision) -> Pass:
        return SharedPass(task, model, precision, self.team)

    def measured(self, model: nn.Module, action: Callable[[], T]) -> T:
        """By all ranks, because each has a part of the weights; what the first one finds counts."""
        model.unshard()  # type: ignore[operator]  # of a module that fully_shard has changed; for calls past its forward
        try:
            found = action()
        finally:
            drop_gathered(model.modules())
        return self.team.by_first(lambda: found)

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        weights: dict[str, Tensor] = _on_host(model.state_dict())
        return weights

    @torch.no_grad()
    def load_weights(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        drop_gathered(model.modules())
        places = model.state_dict()
        if {name: p.shape for name, p in places.items()} != {name: w.shape for name, w in weights.items()}:
            raise ValueError("state_dict: its weights have other names or shapes than those of the model")
        for name, place in places.items():
            local([place])[0].copy_(local_like(weights[name].to(place.device), place))

    def optimizer_state(self, optimizer: llqr.Optimizer) -> Mapping[str, Any]:
        base, own = taken_apart(super().optimizer_state(optimizer))
        state: dict[str, Any] = _on_host({**base, "llqr": own})
        return state

    def load_optimizer(self, optimizer: llqr.Optimizer, state: Mapping[str, Any]) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        momenta = {
            number: {name: _placed(value, parameters[number]) for name, value in entries.items()}
            for number, entries in state["state"].items()
        }
        optimizer.load_state_dict({**state, "state": momenta})


def _on_host(state: Any) -> Any:
    """Every tensor whole and in host memory; each is moved there as soon as it is gathered."""
    return pytree.tree_map_only(Tensor, lambda tensor: whole(tensor.detach()).cpu(), state)


def _placed(value: Any, parameter: Tensor) -> Any:
    """A momentum as its parameter is sharded; counters and the like stay as they are."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    return as_sharded(local_like(value.to(parameter.device), parameter).clone(), parameter)


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "ddp": lambda: Strategy("ddp", Team(dist.group.WORLD)),
    "fsdp2": lambda: FSDP2("fsdp2", Team(dist.group.WORLD)),
}

"""A network with every kind of block, its data, and a training loop, for metrics that are shared out among ranks."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import llqr
from geometries import flat_geometry
from sharded_models import whole

ROWS = 12


class Network(nn.Module):
    """A channels-last convolution, a fused q/k/v projection, and a normalisation."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2)
        self.qkv = nn.Linear(12, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.norm(torch.tanh(self.qkv(torch.tanh(self.conv(x)).flatten(1)))))


def network():
    torch.manual_seed(0)
    return Network().double().to(memory_format=torch.channels_last)


def batch():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 2, 3, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (ROWS,), generator=generator)
    y[[1, 7, 8]] = -100  # ignored, so that ranks have unequal terms
    return x, y


def even_batch(number=0):
    """One of several, without ignored targets: its halves and quarters have equal terms."""
    x, y = batch()
    return x.roll(number, 0) * (1 + 0.1 * number), y.clamp_min(0)


def fsdp2(model, shape):
    """Of 4 ranks, one holds nothing of the convolution and of the head. FSDP2 wants contiguous weights."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "parts")[-len(shape) :])
    model.to(memory_format=torch.contiguous_format)
    for part in (model.qkv, model.head):
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Run:
    """LLQR with F-SAM's probe on the joined batches, of which each rank has a share; the metric is shared out.

    `sharded` is the mesh on which FSDP2 splits the weights too.
    """

    BASES = {
        "sgdm": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    }

    def __init__(self, rank=0, world=1, *, base="sgdm", sharded=None, **settings):
        self.rank, self.world = rank, world
        self.model = network()
        if sharded is not None:
            self.wrapped = fsdp2(self.model, sharded)
        else:
            self.wrapped = DistributedDataParallel(self.model) if world > 1 else self.model
        geometry = flat_geometry(
            self.wrapped, F.cross_entropy, structure="e-kfac", every=3, steps=4, shards="all", **settings
        )
        self.opt = llqr.build("llqr+fsam", self.BASES[base](self.model), geometry=geometry, rho=0.1)

    def advance(self, steps):
        """So many steps from where it is."""
        for number in range(self.opt.steps, self.opt.steps + steps):
            x, y = (part.chunk(self.world)[self.rank] for part in even_batch(number))

            def closure(x=x, y=y):
                self.opt.zero_grad()
                loss = F.cross_entropy(self.wrapped(x), y)
                loss.backward()
                return loss

            self.opt.step(closure, batch=(x, y))
        return self

    def weights(self):
        return {name: whole(w) for name, w in self.model.named_parameters()}

    def save(self, folder, *, raw):
        checkpoint.save(self._state(raw), checkpoint_id=str(folder))

    def load(self, folder, *, raw):
        if raw:
            self.opt.make_state()
        state = self._state(raw)
        checkpoint.load(state, checkpoint_id=str(folder))
        if raw:
            self.model.load_state_dict(state["model"])
            self.opt.load_state_dict(state["optimizer"])
        else:
            set_state_dict(self.model, self.opt, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return self

    def _state(self, raw):
        if raw:
            return {"model": self.model.state_dict(), "optimizer": self.opt.state_dict()}
        return dict(zip(("model", "optimizer"), get_state_dict(self.model, self.opt), strict=True))

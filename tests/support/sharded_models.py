"""Small models, split among ranks by torch's own engines, and what they are compared with: one process."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

ROWS = 8


class Network(nn.Module):
    """Of 2 or 4 ranks, some hold uneven parts of the weights, and some hold nothing of the last bias."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 5)
        self.head = nn.Linear(5, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.down(torch.tanh(self.up(self.norm(x))))))


def network():
    torch.manual_seed(0)
    return Network().double()


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(ROWS, 4, 4, generator=generator, dtype=torch.float64),
            torch.randn(ROWS, 4, 1, generator=generator, dtype=torch.float64),
        )
        for _ in range(count)
    ]


def fsdp2(world, **settings):
    """Two modules on their own, and the rest with the root."""
    mesh = init_device_mesh("cpu", (world,))
    return _sharded(network(), mesh, **settings), *_place(mesh)


def hsdp(world, **settings):
    """Copies of the model; beside 2 ranks, one copy of two parts, which is a mesh of two dimensions too."""
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("copies", "parts"))
    rank = mesh.get_coordinate()
    return _sharded(network(), mesh, **settings), rank[0] * 2 + rank[1], world


def tensor_parallel(world, **settings):
    mesh = init_device_mesh("cpu", (world,))
    return _parallel(network(), mesh), 0, 1


def sequence_parallel(world, **settings):
    """The gradient of the norm's weights is a share of a sum on every rank."""
    mesh = init_device_mesh("cpu", (world,))
    model = network()
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(),
    }
    parallelize_module(model, mesh, plan)
    whole = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),))
    return parallelize_module(model, mesh, whole), 0, 1


def fsdp2_and_tensor_parallel(world, **settings):
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "model"))
    model = _sharded(_parallel(network(), mesh["model"]), mesh["data"], **settings)
    return model, *_place(mesh["data"])


def _parallel(model, mesh):
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _sharded(model, mesh, *, ignored=False, **settings):
    for part in (model.up, model.head):
        fully_shard(part, mesh=mesh, **settings)
    left_out = set(model.norm.parameters()) if ignored else None
    return fully_shard(model, mesh=mesh, ignored_params=left_out, **settings)


def _place(mesh):
    """Which share of the batch this rank takes, and of how many."""
    return mesh.get_local_rank(), mesh.size()


#: Name -> a function of the world size and of FSDP's settings: the model, and this rank's share of the batch.
ENGINES = {
    "fsdp2": fsdp2,
    "hsdp": hsdp,
    "tensor parallel": tensor_parallel,
    "sequence parallel": sequence_parallel,
    "fsdp2 x tensor parallel": fsdp2_and_tensor_parallel,
}


def whole(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def weights(model):
    return {name: whole(tensor) for name, tensor in model.state_dict().items()}


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def closure_of(opt, model, batch, loss_fn):
    def closure():
        opt.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        return loss

    return closure


def refusal(action):
    """The error that this meets, as text; empty if none."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""

"""A metric of weights that FSDP2 has sharded is that of one process on the joined batch, and so are the steps.

A few of these cases are in `test_traps.py`, beside which they need no processes of their own.
"""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import llqr
from geometries import flat_geometry
from llqr.metric import STRUCTURES
from processes import on_ranks
from sharded_models import whole

ROWS = 8
cross_entropy = nn.functional.cross_entropy


class Attention(nn.Module):
    """Fused projections, whose thirds do not end where the shards do; some ranks hold nothing of the last bias."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 6)
        self.qkv = nn.Linear(6, 18)
        self.mlp = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6))
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = torch.tanh(self.embed(x))
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        return self.head(self.norm(x + self.mlp(x)).mean(1))


def network():
    torch.manual_seed(0)
    return Attention().double()


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(ROWS, 3, 4, generator=generator, dtype=torch.float64),
            torch.randint(3, (ROWS,), generator=generator),
        )
        for _ in range(count)
    ]


def sharded(world, kind, **settings):
    """The model, and this rank's share of the batch: its own, whatever the mesh."""
    shape, names = ((world,), ("parts",)) if kind != "hsdp" else ((world // 2, 2), ("copies", "parts"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = network()
    if settings.pop("recompute", False):
        model.mlp.forward = partial(checkpoint, model.mlp.forward, use_reentrant=False)
    if kind == "columns":
        # which FSDP can only do evenly
        settings["shard_placement_fn"] = lambda p: Shard(int(p.ndim == 2 and p.shape[1] % world == 0))
    for part in (model.qkv, model.mlp):
        fully_shard(part, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def trained(model, method, share=slice(None), shards=None, **settings):
    """Weights and metric after steps with two refreshes."""
    fast = {"every": 2, "steps": 3, "lr": 0.02, "ema": 0.5, "structure": "e-kfac"}
    geometry = flat_geometry(model, cross_entropy, shards=shards, **(fast | settings))
    # not Adam, which makes steps of rounding errors: the gradient of the keys' bias is zero
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)
    opt = llqr.build(method, base, geometry=geometry, **({} if method == "llqr" else {"rho": 0.3}))
    for batch in batches(3):
        x, y = (part[share] for part in batch)

        def closure(x=x, y=y):
            opt.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            return loss

        opt.step(closure, batch=(x, y))
    assert geometry.refreshes == 2
    assert geometry.failures == 0
    return {"weights": {n: whole(p) for n, p in model.named_parameters()}, "metric": geometry.metric.named_factors()}


FEW = {
    "fsdp2": ("fsdp2", {}, "llqr+sam", {}),
    "hsdp": ("hsdp", {}, "llqr+fsam", {"divergence": "newton", "structure": "scalar"}),
    "activations recomputed": ("fsdp2", {"recompute": True}, "llqr+sam", {"divergence": "newton"}),
    "without factors": ("fsdp2", {}, "llqr+sam", {"structure": "identity"}),
}
GRID = FEW | {
    f"{kind}, {reshard}, {method}, {structure}, {divergence}": (
        kind,
        {"reshard_after_forward": reshard},
        method,
        {"structure": structure, "divergence": divergence},
    )
    for kind, reshard in (("fsdp2", True), ("fsdp2", False), ("fsdp2", 2), ("hsdp", True), ("hsdp", None))
    for method, divergence in (("llqr", "ngd"), ("llqr+sam", "ngd"), ("llqr+sam", "newton"))
    for structure in (sorted(STRUCTURES.keys() - {"identity"}) if reshard is True else ("e-kfac",))
}


def compare(cases, rank, world):
    own = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
    return {
        name: trained(sharded(world, kind, **fsdp), method, own, shards="all", **settings)
        for name, (kind, fsdp, method, settings) in cases.items()
    }


def assert_as_in_one_process(ranks, cases):
    for name, (_, _, method, settings) in cases.items():
        expected = trained(network(), method, **settings)
        owned = set()
        for found in ranks:
            for part in ("weights", "metric"):
                for key, tensor in found[name][part].items():
                    torch.testing.assert_close(
                        tensor, expected[part][key], rtol=1e-12, atol=1e-12, msg=f"{name}: {part} {key}"
                    )
            owned |= found[name]["metric"].keys()
        assert owned == expected["metric"].keys()
        assert not ranks[0][name]["metric"].keys() & ranks[1][name]["metric"].keys(), "each rank has its own blocks"


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_every_case(world, tmp_path):
    assert_as_in_one_process(on_ranks(world, tmp_path, partial(compare, GRID)), GRID)

"""What a step holds at once beside the base optimizer's, in units of the weights' bytes; factors of `U` come on top."""

import gc

import torch
import torch.nn.functional as F
from torch import nn

import llqr
from geometries import flat_geometry
from live_bytes import LiveBytes

#: The weights at the centre; F-SAM keeps its mean of before the step too, for a step that fails.
VECTORS = {"sgdm": 0, "sam": 1, "asam": 1, "fishersam": 1, "fsam": 2, "llqr": 0, "llqr+sam": 1, "llqr+fsam": 2}


def most_bytes(method: str) -> int:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 3))
    batch = torch.randn(256, 32), torch.randint(3, (256,))  # so many that a pass holds more than what comes after it
    settings = {"rho": 0.1} if "sam" in method else {}
    if method.startswith("llqr"):
        settings["geometry"] = flat_geometry(model, F.cross_entropy, structure="e-kfac", steps=2)
        settings["geometry"].refresh(batch)
    opt = llqr.build(method, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model=model, **settings)

    def closure():
        opt.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        return loss

    for _ in range(2):
        opt.step(closure)
    known = [*model.parameters(), *batch, *(momentum for own in opt.state.values() for momentum in own.values())]
    known += getattr(opt.probe, "_mean", {}).values()
    if opt.geometry is not None:
        known += opt.geometry.metric.named_factors().values()
    gc.collect()
    with LiveBytes(known) as live:
        opt.step(closure)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert live.peak > 10 * weights
    return live.peak // weights


def test_a_step_holds_few_vectors():
    most = {method: most_bytes(method) for method in VECTORS}
    assert {method: held - most["sgdm"] for method, held in most.items()} == VECTORS

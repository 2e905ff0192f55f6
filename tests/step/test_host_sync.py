"""A step never waits for the device: it reads nothing from it and copies nothing from the host to it."""

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import llqr
from geometries import flat_geometry
from llqr.probes.norms import NORMS
from traps.training import batches, closure_of, cross_entropy

METHODS = ["sgdm", "sam", "asam", "fishersam", "fsam", "llqr", "llqr+sam", "llqr+fsam"]
#: Operators that read a number from a device, also when Python asks a tensor for one.
READS = {"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero"}
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no device to wait for")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def trained(method, norm, structure, device="cpu"):
    """The third step of a model, as a function to be called, after two steps of which the first had a refresh."""
    model = network().to(device)
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    settings = {} if method in ("sgdm", "llqr") else {"norm": norm, "rho": 0.1}
    if method.startswith("llqr"):
        settings["geometry"] = flat_geometry(model, cross_entropy, structure=structure, steps=2, engine="forward")
    opt = llqr.build(method, base, measure=True, max_norm=1.0, **settings)
    (batch,) = [tuple(part.to(device) for part in batch) for batch in batches(1)]
    closure = closure_of(opt, model, batch)
    for _ in range(2):
        opt.step(closure, batch=batch)
    return lambda: opt.step(closure)


CASES = [
    pytest.param(method, norm, structure, id=f"{method}-{norm}-{structure}")
    for method in METHODS
    for norm in (NORMS if method not in ("sgdm", "llqr") else ("metric",))
    for structure in (("scalar", "diagonal", "e-kfac") if method.startswith("llqr") else ("diagonal",))
]
every_case = pytest.mark.parametrize(("method", "norm", "structure"), CASES)


@every_case
def test_no_number_is_read_in_a_step(method, norm, structure):
    step = trained(method, norm, structure)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    seen = {event.key for event in profiler.key_averages()}
    assert "aten::addmm" in seen
    assert not READS & seen


def test_reading_a_number_would_be_seen():
    number = torch.ones(())
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        float(number)
    assert READS & {event.key for event in profiler.key_averages()}


@needs_cuda
@every_case
def test_no_step_waits_for_a_gpu(method, norm, structure):
    step = trained(method, norm, structure, "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_layer_numbers_are_sent_to_the_device_once(monkeypatch):
    made = []
    tensor = torch.tensor
    step = trained("llqr+sam", "layer-metric", "diagonal")
    monkeypatch.setattr(torch, "tensor", lambda *args, **settings: made.append(args) or tensor(*args, **settings))
    step()
    assert not made

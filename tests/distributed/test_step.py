"""The SAM family on sharded weights equals one process on the joined batch, whatever splits the weights.

A few of these cases are in `test_traps.py`, beside which they need no processes of their own.
"""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import llqr
from llqr.probes.norms import NORMS
from processes import on_ranks, one_rank
from sharded_models import ENGINES, batches, network, weights

METHODS = ("sam", "asam", "fishersam", "fsam")
STEPS = 2

OPTIONS = {
    "each layer by its own norm": ("sam", {"norm": "layer-metric"}),
    "a norm of one's own": ("sam", {"norm": "own"}),
    "gathered weights kept after forward": ("sam", {"reshard_after_forward": False}),
    "gathered weights kept after backward": ("fsam", {"keep": True}),
    "clipped": ("fsam", {"clip": True}),
    "measured": ("asam", {"measure": True}),
    "accumulated": ("sam", {"accumulate": True}),
    "two calls": ("sam", {"two_calls": True, "keep": True}),
    "a radius of each group": ("sam", {"radii": True}),
    "a group that maximises": ("asam", {"maximize": True}),
}
#: Name -> (engine, method, options), of 2 ranks: what the grid has, each once.
FEW = {
    **{f"fsdp2, {method}": ("fsdp2", method, {}) for method in METHODS},
    **{f"fsdp2, {name}": ("fsdp2", *OPTIONS[name]) for name in ("clipped", "measured", "accumulated", "two calls")},
    "fsdp2, parameters that it ignores": ("fsdp2", "sam", {"ignored": True, "measure": True}),
    "hsdp": ("hsdp", "asam", {}),
    "tensor parallel": ("tensor parallel", "asam", {}),
    "sequence parallel": ("sequence parallel", "fishersam", {}),
    "two dimensions, each layer by its own norm": ("fsdp2 x tensor parallel", "asam", {"norm": "layer-euclidean"}),
    "two dimensions, measured": ("fsdp2 x tensor parallel", "sam", {"measure": True}),
}


def grid(engine):
    """Every case of one engine."""
    fsdp = "parallel" not in engine
    cases = {
        f"{method}, {norm}, {reshard}": (engine, method, {"norm": norm, "reshard_after_forward": reshard})
        for method in METHODS
        for norm in NORMS
        for reshard in ((True, False, None, 2) if fsdp else (True,))
    }
    if "fsdp2" in engine or fsdp:
        one_mesh = ("clipped", "a norm of one's own")  # the sums of DTensors need one
        cases |= {name: (engine, *case) for name, case in OPTIONS.items() if fsdp or name not in one_mesh}
    return cases


def own_norm(v, d):
    return [2 * torch.stack([(a * b).sum() for a, b in zip(v, d, strict=True)]).sum().sqrt()] * len(v)


def optimizer(model, method, options):
    groups = [{"params": [p for n, p in model.named_parameters() if n.startswith(("up", "head"))]}]
    groups += [{"params": [p for n, p in model.named_parameters() if not n.startswith(("up", "head"))]}]
    if options.get("radii"):
        groups[0]["rho"] = 0.7
    if options.get("maximize"):
        groups[1]["maximize"] = True
    base = torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=1e-2)
    settings = {"rho": 0.3} | ({"measure": True, "max_norm": 0.2} if options.get("measure") else {})
    if "norm" in options:
        settings["norm"] = own_norm if options["norm"] == "own" else options["norm"]
    return llqr.build(method, base, model=model, **settings)


def trained(model, method, options, share=0, shares=1):
    """The weights after some steps on this share of the batches, and the memory of the probe."""
    if options.get("keep") and isinstance(model, FSDPModule):
        model.set_reshard_after_backward(False)
    opt = optimizer(model, method, options)
    for batch in batches(STEPS):
        x, y = (part.chunk(shares)[share] for part in batch)

        def closure(x=x, y=y):
            opt.zero_grad()
            pieces = 2 if options.get("accumulate") else 1
            for i, (inputs, targets) in enumerate(zip(x.chunk(pieces), y.chunk(pieces), strict=True)):
                if isinstance(model, FSDPModule):
                    model.set_requires_gradient_sync(i == pieces - 1)
                loss = nn.functional.mse_loss(model(inputs), targets) / pieces
                loss.backward()
            if options.get("ignored") and isinstance(model, FSDPModule):
                for parameter in model.norm.parameters():
                    dist.all_reduce(parameter.grad.div_(shares))
            if options.get("clip"):
                nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            return loss

        if options.get("two_calls"):
            closure()
            opt.first_step(zero_grad=True)
            closure()
            opt.second_step()
        else:
            opt.step(closure)
    measured = {name: opt.last[name] for name in ("gradient_norm", "displacement", "update_norm")} if opt.last else {}
    return weights(model) | measured


def compare(cases, world):
    found = {}
    for name, (engine, method, options) in cases.items():
        chosen = {key: value for key, value in options.items() if key in ("reshard_after_forward", "ignored")}
        model, share, shares = ENGINES[engine](world, **chosen)
        found[name] = trained(model, method, options, share, shares)
    return found


def every_case(engine, rank, world):
    return compare(grid(engine), world)


def assert_as_in_one_process(ranks, cases):
    """All ranks have the weights of one process; a case that does nothing would be no evidence."""
    references = {}
    for name, (_, method, options) in cases.items():
        case = method, *sorted(options.items(), key=str)
        if case not in references:
            references[case] = trained(network(), method, options)
        for found in ranks:
            for key, expected in references[case].items():
                torch.testing.assert_close(found[name][key], expected, rtol=1e-12, atol=1e-12, msg=f"{name}: {key}")


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("engine", ENGINES)
def test_every_case(engine, world, tmp_path):
    assert_as_in_one_process(on_ranks(world, tmp_path, partial(every_case, engine)), grid(engine))


def test_the_cases_differ():
    """Otherwise a comparison would not see that an option had been ignored."""
    plain = trained(network(), "sam", {})
    for name in ("each layer by its own norm", "a norm of one's own", "a radius of each group", "clipped"):
        method, options = OPTIONS[name]
        other = trained(network(), method, options)
        assert any((plain[key] - other[key]).abs().max() > 1e-4 for key in plain), name


@pytest.mark.parametrize("probe", [llqr.ASAMProbe(0.5), llqr.SAMProbe(0.5, norm="layer-euclidean")])
def test_parameters_that_a_framework_has_sharded_since(probe, monkeypatch):
    """As Accelerate does: other tensors in the groups, under the names that the model now has for them."""
    for name, value in one_rank().items():
        monkeypatch.setenv(name, value)
    dist.init_process_group("gloo")
    try:
        found = []
        for sharded in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)).double()
            base = torch.optim.SGD(model.parameters(), lr=0.1)
            opt = llqr.Optimizer(base, copy.deepcopy(probe), model=model)
            if sharded:
                fully_shard(model)
                opt.param_groups[0]["params"] = list(model.parameters())
            x = torch.ones(5, 4, dtype=torch.float64).cumsum(0)

            def closure(opt=opt, model=model, x=x):
                opt.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                return loss

            opt.step(closure)
            found.append([p.full_tensor() if sharded else p.detach() for p in model.parameters()])
        for own, whole in zip(*found, strict=True):
            torch.testing.assert_close(whole, own, rtol=1e-12, atol=1e-12)
    finally:
        dist.destroy_process_group()

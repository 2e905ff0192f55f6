"""What each rank of a model that FSDP2 has sharded finds in refreshes; compared in `test_traps.py`."""

import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import llqr
from geometries import flat_geometry
from sharded_models import batches, closure_of, fsdp2, refusal, sgd, weights

from . import test_metric

mse, cross_entropy = nn.functional.mse_loss, nn.functional.cross_entropy


def traffic(rank, world):
    """Entries that this rank receives for one `U g`, and how many of them are neither held nor owned here."""
    model = test_metric.sharded(world, "fsdp2")
    geometry = flat_geometry(model, cross_entropy, structure="kfac", steps=1, shards="all")
    x, y = (part.chunk(world)[rank] for part in test_metric.batches(1)[0])
    geometry.refresh((x, y))
    received = []
    exchange = dist.all_to_all_single

    def counted(output, given, output_lengths, lengths, group):
        received.append(sum(length for i, length in enumerate(output_lengths) if i != rank))
        return exchange(output, given, output_lengths, lengths, group=group)

    parameters = list(model.parameters())
    dist.all_to_all_single = counted
    try:
        geometry.transport(parameters, [torch.ones_like(parameter) for parameter in parameters])
    finally:
        dist.all_to_all_single = exchange
    own = {block.name for block in geometry.metric.blocks}
    there, back = 0, 0
    for block in geometry.metric.whole.blocks:
        parameter = geometry.parameters[block.parameter]
        here = torch.zeros(parameter.shape, dtype=torch.bool)
        for chunk in here.chunk(world)[rank : rank + 1]:
            chunk.fill_(True)
        held = int(block.piece(here).sum())
        there += block.size - held if block.name in own else 0
        back += 0 if block.name in own else held
    return {"received": received, "needed": [there, back]}


def warned(rank, world):
    """What is said of a loss that is a sum, and of one without curvature."""
    batch = [part.chunk(world)[rank] for part in batches(1)[0]]
    losses = {"a sum": lambda z, y: (z - y).square().sum(), "linear": lambda z, y: (z * y).mean()}
    said = {}
    for name, loss in losses.items():
        model = fsdp2(world)[0]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            flat_geometry(model, loss, steps=1, shards="all").refresh(batch)
        said[name] = [str(w.message) for w in caught if "loss_fn" in str(w.message)]
    return said


def stored(rank, world):
    """Through torch's distributed checkpoints: the largest difference from a run that was not interrupted."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    data = [[part.chunk(world)[rank] for part in batch] for batch in test_metric.batches(4)]

    def fresh():
        model = test_metric.sharded(world, "fsdp2")
        settings = {"structure": "kfac", "steps": 2, "lr": 0.02, "every": 2}
        geometry = flat_geometry(model, cross_entropy, shards="all", **settings)
        return model, llqr.build("llqr+fsam", sgd(model), geometry=geometry, rho=0.3)

    def train(model, opt, some):
        for batch in some:
            opt.step(closure_of(opt, model, batch, cross_entropy), batch=batch)
        return weights(model)

    model, opt = fresh()
    train(model, opt, data[:2])
    model_state, state = get_state_dict(model, opt)
    dcp.save({"model": model_state, "optimizer": state}, checkpoint_id=folder[0])
    expected = train(model, opt, data[2:])
    model, opt = fresh()
    model_state, state = get_state_dict(model, opt)
    dcp.load({"model": model_state, "optimizer": state}, checkpoint_id=folder[0])
    set_state_dict(model, opt, model_state_dict=model_state, optim_state_dict=state)
    found = train(model, opt, data[2:])
    apart = max(float((found[name] - tensor).abs().max()) for name, tensor in expected.items())
    return apart, opt.steps, opt.geometry.engine


def failing_first_refresh(rank, world):
    """Rank 1 fails in the middle of the first refresh; the second one is looked at by all ranks, or by none."""
    model, share, shares = fsdp2(world)
    broken = [rank == 1]

    def loss(outputs, targets):
        if broken[0]:
            raise ArithmeticError("broken")
        return mse(outputs, targets)

    geometry = flat_geometry(model, loss, structure="kfac", steps=3, engine="double-backward", shards="all")
    x, y = (part.chunk(shares)[share] for part in batches(1)[0])
    try:
        geometry.refresh((x, y))
    except (ArithmeticError, RuntimeError) as error:
        raised = type(error).__name__
    broken[0] = False
    return raised, geometry.refresh((x, y)).accepted


def failing_refresh(rank, world):
    """Rank 1 cannot linearise, then sees NaN."""
    model, share, shares = fsdp2(world)
    geometry = flat_geometry(model, mse, structure="kfac", steps=3, shards="all")
    x, y = (part.chunk(shares)[share] for part in batches(1)[0])
    raised = refusal(lambda: geometry.refresh((x[..., :2] if rank == 1 else x, y)))
    geometry.refresh((x, y))
    before = {name: factor.clone() for name, factor in geometry.metric.named_factors().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accepted = geometry.refresh((x * float("nan") if rank == 1 else x, y)).accepted
    kept = all(factor.equal(before[name]) for name, factor in geometry.metric.named_factors().items())
    afterwards = geometry.refresh((x, y)).accepted
    return {"raised": raised, "not a number": accepted, "kept": kept, "afterwards": afterwards}

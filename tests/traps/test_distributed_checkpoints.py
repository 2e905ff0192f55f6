"""`torch.distributed.checkpoint` over several ranks, into fresh optimizers and other numbers of ranks."""

from functools import partial

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import llqr
from processes import on_ranks
from sharded_metrics import Run

STEPS = 3


#: What splits the weights on several ranks, if anything, and how near its engine comes to one process.
KINDS = {
    "ddp": ({}, 1e-12),
    "fsdp2": ({"meshes": {1: (1,), 2: (2,), 4: (4,)}}, 1e-12),
    "fsdp2 to hsdp": ({"meshes": {1: (1, 1), 2: (2,), 4: (2, 2)}}, 1e-12),
}


#: Base optimizers, and whether the raw state is stored.
CASES = [(base, raw) for base in Run.BASES for raw in (False, True)]


def going_on(rank, world, folder, before, now, steps, meshes=None, **settings):
    """All cases from one checkpoint to the next: what each then has."""
    found = {}
    for base, raw in CASES:
        sharded = None if meshes is None else meshes[world]
        run, place = Run(rank, world, base=base, sharded=sharded, **settings), folder / f"{base} {raw}"
        if before is not None:
            run.load(place / before, raw=raw)
        run.advance(steps).save(place / now, raw=raw)
        geometry = run.opt.geometry
        factors = {name: factor.clone() for name, factor in geometry.metric.named_factors().items()}
        found[base, raw] = {"weights": run.weights(), "metric": factors, "refreshes": geometry.refreshes}
    return found


def assert_written_by_owners(owned, folder):
    """Every factor is there once, and an owner of it has written it: the only one, but for copies of the model."""
    written = checkpoint.FileSystemReader(folder).read_metadata().storage_data
    files = [
        (index.fqn.split("llqr_tensors.factors.")[1], place.relative_path)
        for index, place in written.items()
        if "llqr_tensors.factors." in index.fqn
    ]
    assert sorted(name for name, _ in files) == sorted({name for own in owned for name in own})
    for name, file in files:
        assert file in [f"__{rank}_0.distcp" for rank, own in enumerate(owned) if name in own]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_from_two_ranks_to_four_to_one(kind, tmp_path):
    """To one process without shards, and under FSDP2 also to one rank that has all of them."""
    settings, tolerance = KINDS[kind]
    for world, before, now in ((2, None, "first"), (4, "first", "second")):
        work = partial(going_on, folder=tmp_path, before=before, now=now, steps=STEPS, **settings)
        ranks = on_ranks(world, tmp_path, work)
        for base, raw in CASES:
            owned = [found[base, raw]["metric"] for found in ranks]
            copies = 2 if (kind, world) == ("fsdp2 to hsdp", 4) else 1
            assert sum(map(len, owned)) == copies * len(set().union(*owned))
            assert_written_by_owners(owned, tmp_path / f"{base} {raw}" / now)
    last = partial(going_on, folder=tmp_path, before="second", now="third", steps=5)
    ends = [last(0, 1), *(on_ranks(1, tmp_path, partial(last, **settings)) if settings else [])]
    for base, raw in CASES:
        run = Run(base=base).advance(2 * STEPS + 5)
        geometry = run.opt.geometry
        expected = {"weights": run.weights(), "metric": geometry.metric.named_factors()}
        for found in (end[base, raw] for end in ends):
            assert found.pop("refreshes") == geometry.refreshes
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_a_raw_state_that_has_lost_the_momenta_is_refused(tmp_path):
    Run().advance(2).save(tmp_path, raw=True)
    run = Run()
    state = {"model": run.model.state_dict(), "optimizer": run.opt.state_dict()}
    checkpoint.load(state, checkpoint_id=str(tmp_path))
    with pytest.raises(ValueError, match=r"state of 8 parameters is missing; .* call its make_state\(\) before"):
        run.opt.load_state_dict(state["optimizer"])


def saved_in_the_background(rank, world, folder):
    """`async_save` stores a copy of the state: how the training ends that goes on from it."""
    found = {}
    for raw in (False, True):
        run = Run(rank, world).advance(4)
        checkpoint.async_save(run._state(raw), checkpoint_id=str(folder / f"{raw}")).result()
        found[raw] = Run(rank, world).load(folder / f"{raw}", raw=raw).advance(3).weights()
    return found


def test_a_checkpoint_that_was_saved_in_the_background_loads(tmp_path):
    (found,) = on_ranks(1, tmp_path, partial(saved_in_the_background, folder=tmp_path))
    expected = Run().advance(7).weights()
    for weights in found.values():
        assert all(weight.equal(expected[name]) for name, weight in weights.items())


@pytest.mark.parametrize("base", Run.BASES)
def test_one_process_resumes_from_a_raw_state(base, tmp_path):
    Run(base=base).advance(4).save(tmp_path, raw=True)
    run = Run(base=base)
    before = run.weights()
    run.load(tmp_path, raw=True).advance(3)
    assert all(parameter.grad is None or parameter.grad.any() for parameter in run.model.parameters())
    expected = Run(base=base).advance(7).weights()
    assert all(weight.equal(expected[name]) for name, weight in run.weights().items())
    assert not before["head.weight"].equal(expected["head.weight"])


def test_a_first_group_without_parameters_does_not_take_our_state_with_it(tmp_path):
    """Torch drops such groups."""

    def made():
        model = torch.nn.Linear(2, 2)
        return model, llqr.SAM(torch.optim.AdamW([{"params": []}, {"params": model.parameters()}]), rho=0.1)

    def closure():
        opt.zero_grad()
        loss = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    model, opt = made()
    opt.step(closure)
    checkpoint.save(get_optimizer_state_dict(model, opt), checkpoint_id=str(tmp_path))
    model, opt = made()
    state = get_optimizer_state_dict(model, opt)
    checkpoint.load(state, checkpoint_id=str(tmp_path))
    set_optimizer_state_dict(model, opt, state)
    assert opt.steps == 1


def test_the_state_of_one_rank_lacks_the_blocks_of_the_others():
    run = Run().advance(1)
    state = run.opt.state_dict()
    del state["param_groups"][0]["llqr_tensors"]["factors"]["head.weight/in"]
    with pytest.raises(ValueError, match=r"factor 'head.weight/in' is missing; every rank's state has the blocks"):
        Run().opt.load_state_dict(state)

"""`torch.distributed.checkpoint` over several ranks, into fresh optimizers and other numbers of ranks."""

from functools import partial

import pytest
import torch
from torch.distributed import checkpoint

from processes import on_ranks
from sharded_metrics import Run

STEPS = 3


def first(rank, world, folder, **settings):
    raw = settings.pop("raw")
    run = Run(rank, world, **settings).advance(STEPS)
    run.save(f"{folder}/first", raw=raw)
    return list(run.opt.geometry.metric.named_factors())


def second(rank, world, folder, **settings):
    raw = settings.pop("raw")
    run = Run(rank, world, **settings).load(f"{folder}/first", raw=raw).advance(STEPS)
    run.save(f"{folder}/second", raw=raw)
    return list(run.opt.geometry.metric.named_factors())


@pytest.mark.slow
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("base", Run.BASES)
def test_from_two_ranks_to_four_to_one(base, raw, tmp_path):
    settings = {"base": base, "raw": raw, "folder": str(tmp_path)}
    for world, work in ((2, first), (4, second)):
        owned = on_ranks(world, tmp_path, partial(work, **settings))
        names = [name for own in owned for name in own]
        assert len(set(names)) == len(names)
        written = checkpoint.FileSystemReader(tmp_path / work.__name__).read_metadata().storage_data
        files = {
            index.fqn.split("llqr_tensors.factors.")[1]: place.relative_path
            for index, place in written.items()
            if "llqr_tensors.factors." in index.fqn
        }
        assert files.keys() == set(names), "every factor is there once"
        for rank, own in enumerate(owned):
            assert {files[name] for name in own} == {f"__{rank}_0.distcp"}, "and its owner has written it"
    run = Run(base=base).load(tmp_path / "second", raw=raw).advance(5)
    expected = Run(base=base).advance(2 * STEPS + 5)
    torch.testing.assert_close(run.weights(), expected.weights(), rtol=1e-12, atol=1e-12)
    factors = expected.opt.geometry.metric.named_factors()
    torch.testing.assert_close(run.opt.geometry.metric.named_factors(), factors, rtol=1e-12, atol=1e-12)
    assert run.opt.geometry.refreshes == expected.opt.geometry.refreshes


def test_a_raw_state_that_has_lost_the_momenta_is_refused(tmp_path):
    Run().advance(2).save(tmp_path, raw=True)
    run = Run()
    state = {"model": run.model.state_dict(), "optimizer": run.opt.state_dict()}
    checkpoint.load(state, checkpoint_id=str(tmp_path))
    with pytest.raises(ValueError, match=r"state of 8 parameters is missing; .* call its make_state\(\) before"):
        run.opt.load_state_dict(state["optimizer"])


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


def test_the_state_of_one_rank_lacks_the_blocks_of_the_others():
    run = Run().advance(1)
    state = run.opt.state_dict()
    del state["llqr"]["geometry"]["metric"]["factors"]["head.weight/in"]
    with pytest.raises(ValueError, match=r"factor 'head.weight/in' is missing; every rank's state has the blocks"):
        Run().opt.load_state_dict(state)

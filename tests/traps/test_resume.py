"""Resume is bit-exact: momentum, the metric, the F-SAM mean and the counters are all saved."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn

import llqr

from .training import assert_same_bits, assert_same_state, batches, closure_of, mlp, quick_geometry, sgd, train, weights

BASES = {
    "sgdm": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
}
RHO = lambda step: 0.1 + 0.02 * step  # noqa: E731  a counter that is lost would change the radius


def run(name: str, base: str, structure: str, start_after: int = 2):
    """A fresh model, optimizer and scheduler for a method."""
    model = mlp()
    settings: dict = {"rho": RHO, "start_after": start_after} if "sam" in name else {}
    if "llqr" in name:
        settings["geometry"] = quick_geometry(model, structure)
    opt = llqr.build(name, BASES[base](model), **settings)
    return model, opt, torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=10)


def advance(model, opt, scheduler, data) -> None:
    for batch in data:
        opt.step(closure_of(opt, model, batch), batch=batch)
        scheduler.step()


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


#: Not the bases by other names, which are the same without a probe.
CASES = [
    (name, base, structure if "llqr" in name else "")
    for name in llqr.method_names()
    for base, structure in (("sgdm", "e-kfac"), ("adamw", "diagonal"))
    if name not in ("adam", "adamw")
]


@pytest.mark.parametrize(("name", "base", "structure"), CASES)
def test_bit_exact(name, base, structure):
    data = batches(7)
    straight = run(name, base, structure)
    advance(*straight, data)
    first = run(name, base, structure)
    advance(*first, data[:4])
    saved = through_a_file([part.state_dict() for part in first])
    second = run(name, base, structure)
    with torch.no_grad():
        for p in second[0].parameters():
            p.add_(1.0)
    for part, state in zip(second, saved, strict=True):
        part.load_state_dict(state)
    advance(*second, data[4:])
    assert_same_bits(weights(second[0]), weights(straight[0]))
    resumed, expected = second[1].state_dict(), straight[1].state_dict()
    assert_same_state(resumed, expected)
    assert second[1].steps == 7
    if structure:
        assert second[1].geometry.refreshes == 3


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_bit_exact_when_saved_at_a_refresh_or_before_anything_was_learned(steps):
    data = batches(5)
    straight = run("llqr+fsam", "sgdm", "e-kfac", start_after=0)
    advance(*straight, data)
    first = run("llqr+fsam", "sgdm", "e-kfac", start_after=0)
    advance(*first, data[:steps])
    second = run("llqr+fsam", "sgdm", "e-kfac", start_after=0)
    for part, whole in zip(second, first, strict=True):
        part.load_state_dict(through_a_file(whole.state_dict()))
    advance(*second, data[steps:])
    assert_same_bits(weights(second[0]), weights(straight[0]))


def test_a_run_may_go_back_to_an_earlier_state():
    """Loading replaces everything that was learned since, even where the saved state had nothing."""
    data = batches(6)
    model, opt, scheduler = run("llqr+fsam", "sgdm", "diagonal", start_after=0)
    start = through_a_file([part.state_dict() for part in (model, opt, scheduler)])
    advance(model, opt, scheduler, data[:5])
    for part, state in zip((model, opt, scheduler), start, strict=True):
        part.load_state_dict(state)
    assert not opt.geometry.metric.learned
    fresh = run("llqr+fsam", "sgdm", "diagonal", start_after=0)
    for trained in ((model, opt, scheduler), fresh):
        advance(*trained, data)
    assert_same_bits(weights(model), weights(fresh[0]))


def test_a_loaded_state_is_not_shared_with_the_dictionary():
    data = batches(4)
    model, opt, _ = run("llqr+fsam", "sgdm", "kfac", start_after=0)
    train(opt, model, data[:2])
    state = through_a_file(opt.state_dict())
    copy = through_a_file(opt.state_dict())
    opt.load_state_dict(state)
    train(opt, model, data[2:])
    assert_same_state(state["param_groups"], copy["param_groups"])


def saved(name: str = "llqr+sam", structure: str = "kfac") -> dict:
    model, opt, _ = run(name, "sgdm", structure)
    train(opt, model, batches(1))
    return opt.state_dict()


def test_mismatches_are_named():
    state = saved()
    with pytest.raises(ValueError, match="saved with the probe 'sam', this optimizer has 'fsam'"):
        run("llqr+fsam", "sgdm", "kfac")[1].load_state_dict(state)
    with pytest.raises(ValueError, match="saved with the probe 'sam', this optimizer has None"):
        run("llqr", "sgdm", "kfac")[1].load_state_dict(state)
    with pytest.raises(ValueError, match="geometry"):
        run("sam", "sgdm", "")[1].load_state_dict(state)
    with pytest.raises(ValueError, match="geometry"):
        run("llqr+sam", "sgdm", "kfac")[1].load_state_dict(saved("sam"))
    with pytest.raises(ValueError, match=r"structure of 0\.weight"):
        run("llqr+sam", "sgdm", "e-kfac")[1].load_state_dict(state)
    with pytest.raises(ValueError, match=r"not saved by this optimizer; to go on .* adopt=True"):
        run("sam", "sgdm", "")[1].load_state_dict(BASES["sgdm"](mlp()).state_dict())


def test_other_parameters_are_named():
    state = saved("sam")
    wider = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))
    with pytest.raises(ValueError, match=r"parameter 0 was saved with shape \[8, 5\], here it is \[9, 5\]"):
        llqr.SAM(sgd(wider), rho=0.05).load_state_dict(state)
    with pytest.raises(ValueError, match="saved for 4 parameters, this optimizer has 2"):
        llqr.SAM(sgd(mlp()[0]), rho=0.05).load_state_dict(state)


def test_other_groups_are_named():
    model = mlp()
    split = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=0.1)
    with pytest.raises(ValueError, match="parameter group"):
        llqr.SAM(split, rho=0.05).load_state_dict(saved("sam"))


def test_a_refused_state_changes_nothing():
    model, opt, _ = run("llqr+sam", "sgdm", "e-kfac")
    train(opt, model, batches(2))
    before = through_a_file(opt.state_dict())
    state = saved()
    with pytest.raises(ValueError):
        opt.load_state_dict(state)
    assert_same_state(through_a_file(opt.state_dict()), before)


def test_what_is_no_state_of_an_optimizer_is_named():
    model = mlp()
    opt = llqr.SAM(sgd(model), rho=0.05)
    with pytest.raises(ValueError, match=r"^state_dict: expected that of an optimizer, .* got '0\.weight', '0\.bias'"):
        opt.load_state_dict(model.state_dict())
    with pytest.raises(ValueError, match="got 'model', 'opt'"):
        opt.load_state_dict({"model": model.state_dict(), "opt": opt.state_dict()})
    with pytest.raises(ValueError, match="got 'param_groups'"):
        opt.load_state_dict({"param_groups": []})


def test_a_run_of_the_plain_base_goes_on_as_sam():
    model, plain, data = mlp(), mlp(), batches(3)
    base = sgd(plain)
    for batch in data:
        closure_of(base, plain, batch)()
        base.step()
    opt = llqr.SAM(sgd(model), rho=0.05)
    opt.load_state_dict(through_a_file(base.state_dict()), adopt=True)
    momentum = opt.state[model[0].weight]["momentum_buffer"]
    assert momentum.equal(base.state[plain[0].weight]["momentum_buffer"])
    assert (opt.steps, opt.param_groups[0]["rho"]) == (0, 0.05)


@pytest.mark.parametrize(
    ("saved_by", "goes_on_as"), [("sam", "llqr+sam"), ("llqr+sam", "sam"), ("llqr+sam", "llqr+fsam"), ("fsam", "llqr")]
)
def test_a_run_goes_on_as_another_method(saved_by, goes_on_as):
    """With the same weights and momenta; what the other method has not learned starts fresh, what both have is kept."""
    data = batches(5)
    first, second = run(saved_by, "sgdm", "kfac"), run(goes_on_as, "sgdm", "kfac")
    advance(*first, data[:3])
    second[0].load_state_dict(first[0].state_dict())
    state = through_a_file(first[1].state_dict())
    with pytest.raises(ValueError, match=r"load_state_dict\(state, adopt=True\)$"):
        second[1].load_state_dict(state)
    second[1].load_state_dict(state, adopt=True)
    assert second[1].steps == first[1].steps
    for p, q in zip(first[0].parameters(), second[0].parameters(), strict=True):
        assert second[1].state[q]["momentum_buffer"].equal(first[1].state[p]["momentum_buffer"])
    if first[1].geometry is not None and second[1].geometry is not None:
        assert second[1].geometry.refreshes == first[1].geometry.refreshes > 0
        assert second[1].geometry.metric.learned
    elif second[1].geometry is not None:
        assert second[1].geometry.due
        assert not second[1].geometry.metric.learned
    advance(*second, data[3:])


def test_a_state_without_the_metric():
    """A smaller file: the metric is learned again from the identity, all else goes on."""
    opt, again = (run("llqr+fsam", "sgdm", "kfac")[1] for _ in range(2))
    train(opt, opt.model, batches(3))
    state = through_a_file(opt.state_dict(metric=False))
    assert state["param_groups"][0]["llqr"]["geometry"] is None
    assert "factors" not in state["param_groups"][0]["llqr_tensors"]
    with pytest.raises(ValueError, match="adopt=True"):
        again.load_state_dict(state)
    again.load_state_dict(state, adopt=True)
    assert_same_state(through_a_file(again.state_dict(metric=False)), state)
    assert again.geometry.due


def test_another_radius_is_named():
    model, (batch,) = mlp(), batches(1)
    opt = llqr.SAM(sgd(model), rho=0.1)
    train(opt, model, [batch])
    state = through_a_file(opt.state_dict())
    other = llqr.SAM(sgd(model), rho=0.2)
    with pytest.warns(UserWarning, match=r"^rho: saved with 0\.1, this run goes on with its own, 0\.2$"):
        other.load_state_dict(state)
    assert other.param_groups[0]["rho"] == 0.2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llqr.SAM(sgd(model), rho=0.1).load_state_dict(state)
        llqr.SAM(sgd(model), rho=lambda step: 0.2).load_state_dict(state)


@pytest.mark.parametrize(("name", "base"), [("sam", "adamw"), ("llqr+fsam", "sgdm"), ("llqr+fsam", "adamw")])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("fresh", [False, True])
def test_through_torchs_distributed_checkpoint(name, base, fresh, full, tmp_path):
    """In one process: its helpers name parameters, make a fresh optimizer's state, and keep only states and groups."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    data, steps = batches(7), 4
    options = StateDictOptions(full_state_dict=full, cpu_offload=full)
    straight = run(name, base, "e-kfac", start_after=0)
    advance(*straight, data)
    first = run(name, base, "e-kfac", start_after=0)
    advance(*first, data[:steps])
    before = weights(first[0])
    model_state, state = get_state_dict(first[0], first[1], options=options)
    assert_same_bits(weights(first[0]), before)
    saved = {"model": model_state, "optimizer": state}
    checkpoint.save(saved, checkpoint_id=str(tmp_path), no_dist=True)
    second = run(name, base, "e-kfac", start_after=0)
    if not fresh:
        advance(*second, data[:1])
    model_state, state = get_state_dict(second[0], second[1], options=options)
    loaded = saved
    if not full:  # a full state is handed over, or broadcast
        loaded = {"model": model_state, "optimizer": state}
        checkpoint.load(loaded, checkpoint_id=str(tmp_path), no_dist=True)
    set_state_dict(
        second[0],
        second[1],
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
        options=options,
    )
    second[2].load_state_dict(first[2].state_dict())
    advance(*second, data[steps:])
    assert_same_bits(weights(second[0]), weights(straight[0]))
    assert second[1].steps == 7


@pytest.mark.parametrize("name", ["sam", "llqr", "llqr+sam"])
def test_torch_makes_the_state_of_a_fresh_optimizer_by_a_step_of_no_length(name):
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model, opt, _ = run(name, "adamw", "diagonal", start_after=0)
    before = weights(model)
    get_optimizer_state_dict(model, opt)
    assert_same_bits(weights(model), before)
    assert (opt.steps, len(opt.state)) == (0, 4)


@pytest.mark.parametrize("what", ["state_dict", "load_state_dict", "deepcopy", "pickle"])
def test_between_the_two_calls_nothing_is_saved_loaded_or_copied(what):
    model, (batch,) = mlp(), batches(1)
    opt = llqr.SAM(sgd(model), rho=0.05)
    state = opt.state_dict()
    closure = closure_of(opt, model, batch)
    closure()
    opt.first_step()
    calls = {
        "state_dict": opt.state_dict,
        "load_state_dict": lambda: opt.load_state_dict(state),
        "deepcopy": lambda: copy.deepcopy(opt),
        "pickle": lambda: pickle.dumps(opt),
    }
    with pytest.raises(RuntimeError, match="the weights are at the probe"):
        calls[what]()
    opt.restore()
    calls[what]()


def broken(state, what):
    state = copy.deepcopy(state)
    own, tensors = state["param_groups"][0]["llqr"].content, state["param_groups"][0]["llqr_tensors"]
    if what == "groups":
        state["param_groups"][0]["params"].append(9)
    elif what == "engine":
        own["geometry"]["engine"] = "steam"
    elif what == "factors":
        for factor in tensors["factors"].values():
            factor.fill_(float("nan"))
    elif what == "mean":
        tensors["mean"]["0"] = torch.zeros(1)
    elif what == "counters":
        del own["geometry"]["counters"]["refreshes"]
    elif what == "rank":
        del own["geometry"]["saved_by"]
    elif what == "steps":
        own["steps"] = "many"
    return state


@pytest.mark.parametrize("what", ["groups", "engine", "factors", "mean", "counters", "rank", "steps"])
def test_a_state_that_is_refused_changes_nothing(what):
    data = batches(5)
    trained = run("llqr+fsam", "sgdm", "kfac", start_after=0)
    advance(*trained, data[:4])
    state = broken(trained[1].state_dict(), what)
    model, opt, _ = run("llqr+fsam", "sgdm", "kfac", start_after=0)
    train(opt, model, data[:2])
    before = through_a_file(opt.state_dict())
    with pytest.raises((ValueError, KeyError)):
        opt.load_state_dict(state)
    assert_same_state(through_a_file(opt.state_dict()), before)


def test_a_base_that_does_not_always_hand_out_its_state():
    """`ZeroRedundancyOptimizer` does so only after its ranks have put their parts together."""

    class Apart(torch.optim.SGD):
        def state_dict(self):
            raise RuntimeError("consolidate_state_dict")

    data, model = batches(3), mlp()
    opt = llqr.SAM(sgd(model), rho=0.05)
    train(opt, model, data[:2])
    other = copy.deepcopy(model)
    state = through_a_file(opt.state_dict())
    resumed = llqr.SAM(Apart(other.parameters(), lr=0.1, momentum=0.9), rho=0.05)
    resumed.load_state_dict(state)
    train(opt, model, data[2:])
    train(resumed, other, data[2:])
    assert_same_bits(weights(other), weights(model))

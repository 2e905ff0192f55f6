"""`param_groups` and `state` are and remain the base optimizer's own objects."""

import copy
import pickle

import pytest
import torch
from torch import nn

import llqr
from llqr.passes import own_radii

from .training import batches, closure_of, cross_entropy, mlp, quick_geometry, sgd, train


def assert_shared(opt: llqr.Optimizer) -> None:
    assert opt.param_groups is opt.base.param_groups
    assert opt.state is opt.base.state


def test_groups_and_state_are_the_base_optimizers_objects():
    model = mlp()
    opt = llqr.SAM(sgd(model), rho=0.05)
    assert_shared(opt)
    assert opt.defaults is opt.base.defaults
    train(opt, model, batches(2))
    assert_shared(opt)
    assert set(opt.state) == set(model.parameters())


@pytest.mark.parametrize("loaded", ["base", "wrapper"])
def test_also_after_loading_a_state(loaded):
    model, data = mlp(), batches(2)
    opt = llqr.SAM(sgd(model), rho=0.05)
    train(opt, model, data)
    if loaded == "base":
        opt.base.load_state_dict(opt.base.state_dict())
    else:
        opt.load_state_dict(opt.state_dict())
    assert_shared(opt)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, gamma=0.5)
    train(opt, model, data)
    scheduler.step()
    assert opt.base.param_groups[0]["lr"] == pytest.approx(0.05)


def test_writing_to_either_is_writing_to_both():
    opt = llqr.SAM(sgd(mlp()), rho=0.05)
    opt.param_groups[0]["lr"] = 7.0
    assert opt.base.param_groups[0]["lr"] == 7.0
    opt.param_groups = [dict(opt.param_groups[0], lr=8.0)]
    assert opt.base.param_groups[0]["lr"] == 8.0
    assert_shared(opt)


def test_a_groups_own_rho_is_its_radius():
    """One norm over all parameters, each group's displacement with its own radius."""
    model, (batch,) = mlp(torch.float64), batches(1, dtype=torch.float64)
    first, last = list(model[0].parameters()), list(model[2].parameters())
    base = torch.optim.SGD([{"params": first, "rho": 0.5}, {"params": last}], lr=0.1)
    opt = llqr.SAM(base, rho=0.05)
    closure = closure_of(opt, model, batch)
    closure()
    g = {p: p.grad.clone() for p in model.parameters()}
    norm = torch.cat([part.flatten() for part in g.values()]).norm()
    centre = {p: p.detach().clone() for p in model.parameters()}
    opt.first_step()
    for parameters, rho in ((first, 0.5), (last, 0.05)):
        for p in parameters:
            torch.testing.assert_close(p.detach() - centre[p], rho * g[p] / norm, rtol=1e-9, atol=1e-14)
    opt.second_step()


def test_the_groups_show_the_radius():
    """As they show `lr`. Writing to a group sets its radius, which a checkpoint keeps; the probe's is not saved."""
    model = mlp()
    groups = [{"params": model[0].parameters(), "rho": 0.5}, {"params": model[2].parameters()}]
    opt = llqr.SAM(torch.optim.SGD(groups, lr=0.1), rho=0.05)
    assert [group["rho"] for group in opt.param_groups] == [0.5, 0.05]
    opt.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert opt.param_groups[2]["rho"] == 0.05
    assert ["rho" in group for group in opt.state_dict()["param_groups"]] == [True, False, False]
    assert not any("initial_rho" in group for group in opt.state_dict()["param_groups"])
    opt.param_groups[1]["rho"] = 0.2
    state = opt.state_dict()
    opt.param_groups[1]["rho"] = 0.3
    opt.load_state_dict(state)
    assert [group["rho"] for group in opt.param_groups] == [0.5, 0.2, 0.05]


def test_another_wrapper_around_the_same_base_has_its_own_radius():
    base = sgd(mlp())
    llqr.SAM(base, rho=0.05)
    assert llqr.SAM(base, rho=0.1).param_groups[0]["rho"] == 0.1
    assert "rho" not in llqr.SAM(base, rho=lambda step: 0.1).param_groups[0]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))])
def test_a_copy_shows_the_same_radius_as_the_probes(copied):
    opt = copied(llqr.SAM(sgd(mlp()), rho=0.05))
    assert [(group["rho"], own) for group, own in own_radii(opt.base)] == [(0.05, None)]


def test_a_radius_written_to_a_group_is_used():
    model, (batch,) = mlp(torch.float64), batches(1, dtype=torch.float64)
    opt = llqr.SAM(sgd(model), rho=0.05)
    opt.param_groups[0]["rho"] = 0.3
    closure_of(opt, model, batch)()
    centre = torch.cat([p.detach().flatten() for p in model.parameters()])
    opt.first_step()
    moved = torch.cat([p.detach().flatten() for p in model.parameters()]) - centre
    assert moved.norm().item() == pytest.approx(0.3)


def test_a_rho_that_belongs_to_the_base_optimizer_is_not_a_radius():
    """Adadelta's decay rate is called rho, 0.9 by default."""
    model, (batch,) = mlp(torch.float64), batches(1, dtype=torch.float64)
    opt = llqr.SAM(torch.optim.Adadelta(model.parameters()), rho=0.05)
    closure_of(opt, model, batch)()
    centre = torch.cat([p.detach().flatten() for p in model.parameters()])
    opt.first_step()
    moved = torch.cat([p.detach().flatten() for p in model.parameters()]) - centre
    assert moved.norm().item() == pytest.approx(0.05)


def test_add_param_group():
    model, head, data = mlp(), nn.Linear(3, 3), batches(3)
    opt = llqr.FriendlySAM(sgd(model), rho=0.05)
    train(opt, model, data[:1])
    opt.add_param_group({"params": list(head.parameters()), "lr": 0.01, "rho": 0.4})
    assert_shared(opt)
    assert opt.param_groups[1]["momentum"] == 0.9
    before = head.weight.detach().clone()
    train(opt, nn.Sequential(model, head), data[1:])
    assert not head.weight.equal(before)
    assert head.weight in opt.state


def test_parameters_a_geometry_does_not_know_pass_unchanged():
    model, head, (batch,) = mlp(torch.float64), nn.Linear(3, 3, dtype=torch.float64), batches(1, dtype=torch.float64)
    both = nn.Sequential(model, head)
    base = torch.optim.SGD(both.parameters(), lr=1.0)
    opt = llqr.LLQR(base, llqr.FixedGeometry([(p, lambda g: 5 * g) for p in model.parameters()]))
    g = torch.autograd.grad(cross_entropy(both(batch[0]), batch[1]), list(both.parameters()))
    before = [p.detach().clone() for p in both.parameters()]
    opt.step(closure_of(opt, both, batch))
    factors = [5.0] * 4 + [1.0] * 2
    for p, w, part, u in zip(both.parameters(), before, g, factors, strict=True):
        torch.testing.assert_close(p.detach(), w - u * part)


def test_zero_grad_reaches_every_parameter():
    model, (batch,) = mlp(), batches(1)
    opt = llqr.SAM(sgd(model), rho=0.05)
    closure_of(opt, model, batch)()
    opt.zero_grad(set_to_none=False)
    assert all(p.grad.eq(0).all() for p in model.parameters())
    opt.zero_grad()
    assert all(p.grad is None for p in model.parameters())


class Imitation:
    """What Lightning and Fabric hand out: of the optimizer's class, with nothing of its own, delegating the rest."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.__class__ = type("Imitation", (type(self), type(optimizer)), {})

    def __getattr__(self, name: str) -> object:
        return getattr(self._optimizer, name)


def test_an_imitation_of_the_class_works_on_the_original():
    model, data = mlp(), batches(3)
    opt = llqr.FriendlySAM(sgd(model), rho=0.05)
    other = Imitation(opt)
    assert isinstance(other, llqr.FriendlySAM)
    for name in ("param_groups", "state", "defaults"):
        assert getattr(other, name) is getattr(opt.base, name)
    other.param_groups[0]["lr"] = 0.05
    for batch in data:
        closure = closure_of(other, model, batch)
        closure()
        other.first_step(zero_grad=True)
        closure()
        other.second_step(zero_grad=True)
    assert opt.steps == other.steps == 3
    twin = mlp()
    train(llqr.FriendlySAM(sgd(twin, lr=0.05), rho=0.05), twin, data)
    assert all(a.equal(b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    other.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert len(opt.base.param_groups) == 2
    other.load_state_dict(other.state_dict())
    assert opt.steps == 3


class ScheduleFree(torch.optim.SGD):
    """Has two modes, as schedule-free optimizers do."""

    mode = "train"

    def train(self) -> None:
        self.mode = "train"

    def eval(self) -> None:
        self.mode = "eval"


def test_methods_that_only_the_base_has_reach_it():
    opt = llqr.SAM(ScheduleFree(mlp().parameters(), lr=0.1), rho=0.05)
    opt.eval()
    assert opt.base.mode == opt.mode == "eval"
    opt.train()
    assert opt.base.mode == "train"
    assert not hasattr(llqr.SAM(sgd(mlp()), rho=0.05), "train")
    with pytest.raises(AttributeError, match="nonsense"):
        opt.nonsense  # noqa: B018


def test_a_geometry_of_another_model_is_refused():
    model, other = mlp(), mlp()
    with pytest.raises(ValueError, match=r"geometry: none of its parameters is one of the optimizer's"):
        llqr.LLQRSAM(sgd(model), quick_geometry(other), rho=0.05)
    geometry = quick_geometry(model)
    copies = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.load_state_dict(copies, assign=True)
    with pytest.raises(ValueError, match="geometry: none"):
        llqr.LLQR(sgd(model), geometry)


def test_a_radius_of_a_groups_own_stays_when_the_state_of_another_method_is_adopted():
    model = mlp()
    groups = [{"params": [p for p in model.parameters() if p.ndim > 1]}, {"params": [model[0].bias, model[2].bias]}]
    plain = torch.optim.SGD([dict(group) for group in groups], lr=0.1)
    opt = llqr.SAM(torch.optim.SGD([groups[0], groups[1] | {"rho": 0.0}], lr=0.1), rho=0.05)
    opt.load_state_dict(plain.state_dict(), adopt=True)
    assert [group["rho"] for group in opt.param_groups] == [0.05, 0.0]

"""Base optimizers, averages and adapters from elsewhere, unchanged inside SAM, beside SAM written by hand."""

import pytest
import pytorch_optimizer
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import llqr
from reference_loops import seed_micro_batch, train_by_hand
from small_trainings import assert_same, sam, samples, sgd


def network():
    """Without BatchNorm: a bias before it has a gradient of rounding errors, which Adam turns into steps."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))


BASES = {
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "AdamW, foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
    "Muon": lambda parameters: pytorch_optimizer.Muon(_grouped_for_muon(parameters), lr=0.01),
    "Lion": lambda parameters: pytorch_optimizer.Lion(parameters, lr=0.01),
    "SOAP": lambda parameters: pytorch_optimizer.SOAP(parameters, lr=0.01),
    "schedule-free SGD": lambda parameters: pytorch_optimizer.ScheduleFreeSGD(parameters, lr=0.1),
}


def _grouped_for_muon(parameters):
    return [{"params": [p], "use_muon": p.ndim == 2} for p in parameters]


def train(model, opt, after=lambda: None):
    for i, (x, y) in enumerate(samples()):

        def closure(x=x, y=y, i=i):
            seed_micro_batch(0, i)
            opt.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            return loss

        opt.step(closure)
        after()


@pytest.mark.parametrize("name", BASES)
def test_any_base_optimizer(name):
    model, other = network(), network()
    rho = 0.0 if name == "SOAP" else 0.1  # its eigenvectors of singular matrices amplify rounding errors
    opt, base = llqr.SAM(BASES[name](list(model.parameters())), rho=rho), BASES[name](list(other.parameters()))
    for one in (opt, base):
        if name.startswith("schedule-free"):
            one.train()
    train(model, opt)
    train_by_hand(other, base, samples(), rho=rho)
    assert_same(model, other, rtol=1e-5, atol=1e-6)
    if name.startswith("schedule-free"):
        for one in (opt, base):
            one.eval()  # the averages are the weights now
        assert_same(model, other, rtol=1e-5, atol=1e-6)


def test_an_averaged_model_averages_the_centres():
    model, other = network(), network()
    average = torch.optim.swa_utils.AveragedModel(model)
    train(model, sam(model), after=lambda: average.update_parameters(model))
    base, seen = sgd(other), []
    for i, batch in enumerate(samples()):
        train_by_hand(other, base, [batch], rho=0.1, first=i)
        seen.append([p.detach().clone() for p in other.parameters()])
    for mean, *parts in zip(average.module.parameters(), *seen, strict=True):
        torch.testing.assert_close(mean.detach(), torch.stack(parts).mean(0), rtol=1e-5, atol=1e-6)


class LowRank(nn.Linear):
    """A frozen layer and a trainable product of two thin matrices beside it, as in LoRA."""

    def __init__(self):
        super().__init__(4, 3)
        self.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(3, 2))

    def forward(self, x):
        return super().forward(x) + x @ (self.up @ self.down).T


@pytest.mark.parametrize("learned", [False, True], ids=["sam", "llqr+sam"])
def test_adapters_beside_frozen_layers(learned):
    torch.manual_seed(0)
    model, other = LowRank(), LowRank()
    other.load_state_dict(model.state_dict())
    trainable, frozen = [model.down, model.up], model.weight.clone()
    base = torch.optim.SGD(trainable, lr=0.1)
    if not learned:
        train(model, llqr.SAM(base, rho=0.1))
        train_by_hand(other, torch.optim.SGD(trainable_of(other), lr=0.1), samples(), rho=0.1)
        assert_same(model, other, rtol=1e-6, atol=1e-6)
        return
    geometry = llqr.Geometry(model, cross_entropy, every=2, inner=llqr.Inner(steps=3, lr=0.05))
    assert set(geometry.parameters) == {"down", "up"}
    geometry.batches = samples()
    train(model, llqr.LLQRSAM(base, geometry, rho=0.1))
    assert model.weight.equal(frozen)
    assert geometry.refreshes == len(samples()) / 2


def trainable_of(model):
    return [p for p in model.parameters() if p.requires_grad]


SCHEDULERS = {
    "StepLR": {"step_size": 2},
    "MultiStepLR": {"milestones": [2, 4]},
    "ExponentialLR": {"gamma": 0.5},
    "CosineAnnealingLR": {"T_max": 6},
    "CosineAnnealingWarmRestarts": {"T_0": 3},
    "LinearLR": {"total_iters": 4},
    "OneCycleLR": {"max_lr": 1.0, "total_steps": 10},
    "CyclicLR": {"base_lr": 0.1, "max_lr": 1.0, "step_size_up": 2},
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_set_what_they_set_for_the_base_alone(name):
    model, other = network(), network()
    opt, base = sam(model), sgd(other)
    ours, theirs = (getattr(torch.optim.lr_scheduler, name)(one, **SCHEDULERS[name]) for one in (opt, base))
    seen = []

    def compare():
        base.step()
        for scheduler in (ours, theirs):
            scheduler.step()
        seen.append([(one.param_groups[0]["lr"], one.param_groups[0]["momentum"]) for one in (opt.base, base)])

    train(model, opt, after=compare)
    assert all(mine == alone for mine, alone in seen)
    assert len({mine for mine, _ in seen}) > 1

"""`U g` reaches the base optimizer without a copy, and the gradients' own tensors are put back."""

import functools

import pytest
import torch
from torch import nn

import llqr
from geometries import flat_geometry
from launches import Launches
from llqr.passes import substituted
from traps.training import batches, closure_of, cross_entropy, mlp, quick_geometry, sgd, train, weights


@pytest.mark.parametrize("structure", ["diagonal", "scalar", "kfac", "e-kfac", "dense"])
def test_the_gradients_own_tensors_are_put_back(structure):
    model, (batch,) = mlp(), batches(1)
    opt = llqr.LLQR(sgd(model), quick_geometry(model, structure))
    made, seen = [], []

    def closure():
        loss = closure_of(opt, model, batch)()
        made[:] = [(p.grad, p.grad.clone()) for p in model.parameters()]
        return loss

    opt.base.register_step_pre_hook(lambda *_: seen.append([p.grad.clone() for p in model.parameters()]))
    opt.step(closure, batch=batch)
    names = [name for name, _ in model.named_parameters()]
    Ug = opt.geometry.metric.apply({name: value for name, (_, value) in zip(names, made, strict=True)})
    for parameter, name, (tensor, value), transported in zip(model.parameters(), names, made, seen[0], strict=True):
        assert parameter.grad is tensor
        assert tensor.equal(value)
        assert transported.equal(Ug[name])
        assert not transported.equal(value)


def test_nothing_is_copied():
    model, data = mlp(), batches(2)
    opt = llqr.LLQR(sgd(model), quick_geometry(model, "diagonal"))
    train(opt, model, data)
    closure_of(opt, model, data[0])()
    with Launches() as operators:
        opt.step()
    assert operators.total > 0
    assert not {"_foreach_copy_", "copy_", "clone"} & operators.by_name.keys()


def test_they_are_put_back_when_the_base_optimizer_fails():
    model, (batch,) = mlp(), batches(1)
    opt = llqr.LLQR(sgd(model), quick_geometry(model))
    opt.geometry.refresh(batch)

    def fail(*_):
        raise ArithmeticError

    opt.base.register_step_pre_hook(fail)
    closure_of(opt, model, batch)()
    own = [p.grad for p in model.parameters()]
    with pytest.raises(ArithmeticError):
        opt.step()
    assert all(p.grad is g for p, g in zip(model.parameters(), own, strict=True))


def convolutions(memory_format):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 2), nn.Flatten(), nn.Linear(20, 3))
    return model.to(memory_format=memory_format)


@pytest.mark.parametrize("base", [sgd, lambda model: torch.optim.AdamW(model.parameters(), fused=True)])
@pytest.mark.parametrize("structure", ["kfac", "diagonal"])
def test_gradients_in_another_memory_order(structure, base):
    """A stack of matrices is row-major, a channels-last gradient is not: fused optimizers need them to agree."""
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(6, 3, 5, 5, generator=generator), torch.randint(3, (6,), generator=generator))] * 3
    ends = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        model = convolutions(memory_format)
        geometry = flat_geometry(model, cross_entropy, structure=structure, steps=3, lr=0.02, engine="double-backward")
        opt = llqr.LLQRSAM(base(model), geometry, rho=0.05)
        opt.base.register_step_pre_hook(lambda *_, model=model: _strides_agree(model))
        train(opt, model, data)
        ends.append(weights(model))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-4, atol=1e-5)


def _strides_agree(model):
    assert all(p.grad.stride() == p.stride() for p in model.parameters())


def test_whatever_a_given_metric_returns():
    """A tensor of another dtype, of another memory order, or the gradient itself."""
    parameters = [nn.Parameter(torch.ones(2, 3)) for _ in range(3)]
    grads = [torch.full((2, 3), float(i)) for i in range(3)]
    for parameter, gradient in zip(parameters, grads, strict=True):
        parameter.grad = gradient
    Ug = [grads[0], torch.full((2, 3), 7.0, dtype=torch.float64), torch.arange(6.0).reshape(3, 2).t()]
    with substituted(parameters, Ug):
        assert [p.grad.dtype for p in parameters] == [torch.float32] * 3
        assert all(p.grad.is_contiguous() for p in parameters)
        torch.testing.assert_close([p.grad for p in parameters], [part.float() for part in Ug])
    assert all(p.grad is g for p, g in zip(parameters, grads, strict=True))


@pytest.mark.parametrize("structure", ["diagonal", "kfac"])
@pytest.mark.parametrize("make", [llqr.LLQR, functools.partial(llqr.LLQRSAM, rho=0.05)])
def test_gradients_that_are_expanded(make, structure):
    """`torch.autograd.grad` returns such tensors, of which several entries are one number in memory."""
    ends = []
    for expanded in (True, False):
        model, (batch,) = mlp(), batches(1)
        opt = make(sgd(model), quick_geometry(model, structure))
        opt.geometry.refresh(batch)
        for advance in (opt.first_step, opt.second_step):
            for parameter in model.parameters():
                gradient = torch.full((), 0.5).expand_as(parameter)
                parameter.grad = gradient if expanded else gradient.clone(memory_format=torch.contiguous_format)
            advance()
        ends.append(weights(model))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-6, atol=1e-7)


class Shared(nn.Module):
    """`torch.autograd.grad` gives `a` and `b` the same tensor, and `shift` an expanded one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.shift = (nn.Parameter(torch.randn(3, dtype=torch.float64)) for _ in range(3))

    def forward(self, x):
        return ((self.a + self.b) * x).tanh() + self.shift.sum()


@pytest.mark.parametrize("max_norm", [None, 0.01])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", ["sam", "asam", "fishersam", "fsam", "llqr", "llqr+sam"])
def test_gradients_that_share_memory(name, scaled, max_norm):
    x, ends = torch.randn(4, 3, dtype=torch.float64), []
    for backward in (True, False):
        model = Shared()
        settings = {"rho": 0.5} if "sam" in name else {}
        if "llqr" in name:
            settings["geometry"] = llqr.FixedGeometry([(model.a, lambda g: 2 * g)])
        opt = llqr.build(name, torch.optim.SGD(model.parameters(), lr=0.1), max_norm=max_norm, **settings)
        scaler = torch.amp.GradScaler("cpu", enabled=scaled)

        def closure(model=model, opt=opt, scaler=scaler, backward=backward):
            opt.zero_grad()
            loss = model(x).square().mean()
            if backward:
                scaler.scale(loss).backward()
                return loss
            grads = torch.autograd.grad(scaler.scale(loss), list(model.parameters()))
            assert grads[0].data_ptr() == grads[1].data_ptr()
            assert grads[2].stride() == (0,)
            for parameter, gradient in zip(model.parameters(), grads, strict=True):
                parameter.grad = gradient
            return loss

        for _ in range(2):
            opt.step(closure, grad_scaler=scaler)
            scaler.update()
        ends.append(weights(model))
    torch.testing.assert_close(ends[0], ends[1])

"""Tensors that another optimizer moves: the second pass does not add to the gradients that the first has left there."""

import warnings

import pytest
import torch
from torch import nn

import llqr

from .training import assert_same_bits, batches, closure_of, cross_entropy, mlp, quick_geometry, sgd, weights


class Both(nn.Module):
    """A network and its head: in one module, or side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = mlp(), nn.Linear(3, 3)

    def loss(self, batch) -> torch.Tensor:
        return cross_entropy(self.head(self.body(batch[0])), batch[1])

    def closure(self, opt: torch.optim.Optimizer, batch, returned=lambda loss: loss):
        def closure():
            opt.zero_grad()
            loss = self.loss(batch)
            loss.backward()
            return returned(loss)

        return closure

    def head_gradients(self, batch) -> dict[str, torch.Tensor]:
        grads = torch.autograd.grad(self.loss(batch), list(self.head.parameters()))
        return dict(zip(dict(self.head.named_parameters()), grads, strict=True))


class Apart(Both):
    """Neither of the two is in a module with the other."""

    def __init__(self) -> None:
        super().__init__()
        self.both = [self._modules.pop("body"), self._modules.pop("head")]

    def __getattr__(self, name: str):
        return self.both[("body", "head").index(name)] if name in ("body", "head") else super().__getattr__(name)


def sam(body: nn.Module) -> llqr.Optimizer:
    return llqr.SAM(sgd(body), rho=0.5)


def llqr_sam(body: nn.Module) -> llqr.Optimizer:
    """Is given its model, to which the head does not belong."""
    geometry = quick_geometry(body)
    geometry.batches = batches(1)
    return llqr.LLQRSAM(sgd(body), geometry, rho=0.5)


def left(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters()}


RETURNS = {"loss": lambda loss: loss, "tuple": lambda loss: (loss, 1.0), "dict": lambda loss: {"loss": loss}}


@pytest.mark.parametrize("returned", RETURNS)
@pytest.mark.parametrize("make", [sam, llqr_sam])
@pytest.mark.parametrize("kind", [Both, Apart])
def test_a_head_keeps_the_gradients_of_the_first_pass(kind, make, returned):
    model = kind()
    opt, plain = make(model.body), torch.optim.SGD(model.head.parameters(), lr=0.1)
    for batch in batches(3):
        expected = model.head_gradients(batch)
        plain.zero_grad()
        opt.step(model.closure(opt, batch, RETURNS[returned]))
        assert_same_bits(left(model.head), expected)
        plain.step()


@pytest.mark.parametrize("returned", [lambda loss: loss, lambda loss: loss.item()])
@pytest.mark.parametrize("kind", [Both, Apart])
def test_a_closure_that_clears_them_leaves_those_of_the_second_pass(kind, returned):
    model, (batch,) = kind(), batches(1)
    opt, plain = sam(model.body), torch.optim.SGD(model.head.parameters(), lr=0.1)
    at_the_probe = []

    def closure():
        plain.zero_grad()
        at_the_probe[:] = [model.head_gradients(batch)]
        return model.closure(opt, batch, returned)()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step(closure)
    assert_same_bits(left(model.head), at_the_probe[0])


def test_gradients_that_were_there_before_are_kept_too():
    """As of a loss that concerns the head alone."""
    model, (batch,) = Apart(), batches(1)
    opt = sam(model.body)
    expected = {name: 1 + gradient for name, gradient in model.head_gradients(batch).items()}
    for p in model.head.parameters():
        p.grad = torch.ones_like(p)
    own = model.head.weight.grad
    opt.step(model.closure(opt, batch))
    assert_same_bits(left(model.head), expected)
    assert model.head.weight.grad is own


def test_a_tensor_that_is_in_no_module():
    model, (batch,) = mlp(), batches(1)
    shift = torch.zeros(3, requires_grad=True)
    opt = sam(model)
    (expected,) = torch.autograd.grad(cross_entropy(model(batch[0]) + shift, batch[1]), shift)
    opt.step(closure_of(opt, lambda x: model(x) + shift, batch))
    assert shift.grad.equal(expected)


def test_inputs_that_want_a_gradient():
    """They are new ones in every step."""
    model = mlp()
    opt = sam(model)
    for x, y in batches(3):
        x = x.clone().requires_grad_()
        (expected,) = torch.autograd.grad(cross_entropy(model(x), y), x)
        opt.step(closure_of(opt, model, (x, y)))
        assert x.grad.equal(expected)
        del x


def test_an_embedding_whose_gradient_is_sparse():
    model, table = nn.Linear(5, 3), nn.Embedding(4, 5, sparse=True)
    opt, plain = sam(model), torch.optim.SparseAdam(table.parameters())
    rows, targets = torch.tensor([0, 1, 1]), torch.tensor([0, 1, 2])
    (expected,) = torch.autograd.grad(cross_entropy(model(table(rows)), targets), list(table.parameters()))
    opt.step(closure_of(opt, lambda rows: model(table(rows)), (rows, targets)))
    assert table.weight.grad.to_dense().equal(expected.to_dense())
    plain.step()


def test_they_are_put_back_when_the_second_pass_fails():
    model, (batch,) = Both(), batches(1)
    opt, calls = sam(model.body), []
    expected, before = model.head_gradients(batch), weights(model)

    def closure():
        loss = model.closure(opt, batch)()
        calls.append(loss)
        if len(calls) == 2:
            raise ArithmeticError
        return loss

    with pytest.raises(ArithmeticError):
        opt.step(closure)
    assert_same_bits(left(model.head), expected)
    assert_same_bits(weights(model), before)


def test_the_two_call_form():
    model = Both()
    opt, plain = sam(model.body), torch.optim.SGD(model.head.parameters(), lr=0.1)
    for batch in batches(3):
        expected = model.head_gradients(batch)
        model.loss(batch).backward()
        opt.first_step()
        model.loss(batch).backward()
        opt.second_step(zero_grad=True)
        assert_same_bits(left(model.head), expected)
        plain.step()
        plain.zero_grad()


def test_a_loop_that_has_used_and_cleared_them_does_not_get_them_back():
    model, (batch,) = Both(), batches(1)
    opt, plain = sam(model.body), torch.optim.SGD(model.head.parameters(), lr=0.1)
    model.loss(batch).backward()
    opt.first_step()
    plain.step()
    plain.zero_grad()
    cross_entropy(model.body(batch[0]), batch[1]).backward()
    opt.second_step()
    assert model.head.weight.grad is None


ADDED = r"^step: the second pass has added .* Linear\.weight, Linear\.bias, which are not the optimizer's; .* return"


@pytest.mark.parametrize("make", [sam, llqr_sam])
def test_what_nobody_can_know_is_said_once(make):
    """A closure that returns a number does not tell which gradients are its own."""
    model, (batch,) = Apart(), batches(1)
    opt = make(model.body)
    closure = model.closure(opt, batch, torch.Tensor.item)
    with pytest.warns(UserWarning, match=ADDED):
        opt.step(closure)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.step(closure)


def test_it_is_said_in_the_two_call_form():
    model, (batch,) = Apart(), batches(1)
    opt = sam(model.body)
    model.loss(batch).backward()
    opt.first_step()
    model.loss(batch).backward()
    with pytest.warns(UserWarning, match=ADDED):
        opt.second_step()

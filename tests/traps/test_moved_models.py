"""A model that changes its dtype or device in the middle of a run."""

import pytest
import torch

import llqr

from .training import batches, closure_of, mlp, quick_geometry, sgd, train

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


@pytest.mark.parametrize("device", DEVICES)
def test_what_friendly_sam_remembers_goes_with_it(device):
    model, data = mlp(), batches(3)
    opt = llqr.FriendlySAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.05)
    train(opt, model, data[:2])
    mean = opt.probe.state_dict(list(model.parameters()))["mean"]
    model.to(device, torch.float64)
    x, y = (part.to(device) for part in data[2])
    opt.step(closure_of(opt, model, (x.double(), y)))
    after = opt.probe.state_dict(list(model.parameters()))["mean"]
    for i, p in enumerate(model.parameters()):
        assert after[i].dtype == torch.float64
        assert after[i].device == p.device
        assert not after[i].equal(mean[i].to(p))
        assert (after[i] - 0.9 * mean[i].to(p)).norm() < 0.2  # 0.1 g was added


def test_a_learned_metric_says_at_once_that_its_model_has_moved():
    """Not only at the next refresh: until then, U of another precision would be applied."""
    model, (batch,) = mlp(), batches(1)
    opt = llqr.LLQRSAM(sgd(model), quick_geometry(model, every=100), rho=0.05)
    opt.step(closure_of(opt, model, batch), batch=batch)
    model.double()
    with pytest.raises(RuntimeError, match=r"^model: '0\.weight' moved from .*make the geometry after"):
        opt.step(closure_of(opt, model, (batch[0].double(), batch[1])))


def grow(model):
    """A class more, in the place of the old weights."""
    model[2].weight.data, model[2].bias.data = torch.randn(4, 8), torch.randn(4)


def test_friendly_sam_begins_anew_where_a_shape_has_changed():
    model, data = mlp(), batches(3)
    opt = llqr.FriendlySAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.05)
    train(opt, model, data[:2])
    grow(model)
    opt.step(closure_of(opt, model, data[2]))
    mean = opt.probe.state_dict(list(model.parameters()))["mean"]
    assert [tuple(mean[i].shape) for i in range(4)] == [(8, 5), (8,), (4, 8), (4,)]


def test_a_conversion_that_swaps_parameters():
    """torch refuses it while anything has a weak reference to them."""
    model, data = mlp(), batches(2)
    opt = llqr.SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.05)
    train(opt, model, data[:1])
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    opt.step(closure_of(opt, model, (data[1][0].double(), data[1][1])))
    assert all(p.dtype == torch.float64 for p in model.parameters())

"""Fused attention and `torch.compile` have no forward mode or double backward: a fallback is used, with one warning."""

import copy
import gc
import warnings

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import llqr
from live_bytes import LiveBytes

from .training import assert_same_bits, batches, closure_of, cross_entropy, mlp, quick_geometry, sgd, train, weights


class Attention(nn.Module):
    """Two tokens of eight features; the fused CPU kernel needs a batch, heads and a contiguous layout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv, self.head = nn.Linear(5, 16), nn.Linear(8, 24), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.embed(x).view(-1, 2, 8)
        q, k, v = (part.view(-1, 2, 2, 4).transpose(1, 2) for part in self.qkv(tokens).chunk(3, dim=-1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.head(mixed.transpose(1, 2).reshape(-1, 16))


def refreshed(kernel: SDPBackend, engine: str) -> tuple[llqr.Geometry, list[warnings.WarningMessage]]:
    model, data = Attention(), batches(2)
    with sdpa_kernel(kernel), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        geometry = quick_geometry(model, "kfac", engine=engine, every=1)
        opt = llqr.LLQRSAM(sgd(model), geometry, rho=0.05)
        train(opt, model, data)
    assert (geometry.refreshes, geometry.failures) == (2, 0)
    return geometry, [w for w in seen if issubclass(w.category, llqr.RefreshWarning)]


def test_fused_attention_falls_back_and_says_so_once():
    geometry, said = refreshed(SDPBackend.FLASH_ATTENTION, "auto")
    assert geometry.engine == "finite-differences"
    assert len(said) == 1
    assert "finite-differences" in str(said[0].message)
    assert "flash" in str(said[0].message)


def test_engines_that_were_refused_leave_nothing_behind():
    """Their activations go at once, not when Python next collects cycles: on ViT-B they are gigabytes."""
    model, (batch, *_) = Attention(), batches(1)
    geometry = quick_geometry(model, "kfac", engine="auto")
    refused = pytest.warns(llqr.RefreshWarning, match="finite-differences")
    gc.disable()
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), refused, LiveBytes([*model.parameters(), *batch]) as live:
            geometry.refresh(batch)
    finally:
        gc.enable()
    assert live.now == geometry.memory()["allocated"] > 0


def test_the_fallback_learns_what_exact_products_learn():
    fallback, _ = refreshed(SDPBackend.FLASH_ATTENTION, "auto")
    exact, said = refreshed(SDPBackend.MATH, "auto")
    assert exact.engine == "double-backward"
    assert not said
    reference = exact.metric.named_factors()
    for name, factor in fallback.metric.named_factors().items():
        torch.testing.assert_close(factor, reference[name], rtol=1e-3, atol=1e-4)
    assert any(not factor.equal(torch.eye(*factor.shape[-2:])) for factor in reference.values() if factor.ndim == 2)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["sam", "fsam", "llqr", "llqr+sam"])
def test_compiled_models_train_like_plain_ones(name, backend):
    torch.compiler.reset()
    data = batches(3)

    def optimizer(model: nn.Module, seen: nn.Module) -> llqr.Optimizer:
        learned = {"geometry": quick_geometry(seen, "kfac")} if "llqr" in name else {}
        return llqr.build(name, sgd(model), **learned | ({"rho": 0.05} if "sam" in name else {}))

    plain, model = mlp(), mlp()
    train(optimizer(plain, plain), plain, data)
    compiled = torch.compile(model, backend=backend)
    opt = optimizer(model, compiled)
    for batch in data:
        opt.step(closure_of(opt, compiled, batch), batch=batch)
    torch.testing.assert_close(weights(model), weights(plain), rtol=1e-5, atol=1e-7)


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).tanh())


@pytest.mark.parametrize("in_place", [True, False])
def test_a_compiled_model_is_compiled_once_and_its_statistics_are_updated_once_per_step(in_place):
    torch.compiler.reset()
    graphs = []

    def backend(graph, examples):
        graphs.append(graph)
        return graph.forward

    model = compiled = Normalised()
    if in_place:
        model.compile(backend=backend, fullgraph=True)
    else:
        compiled = torch.compile(model, backend=backend, fullgraph=True)
    opt = llqr.SAM(sgd(model), rho=0.05, model=model)
    for steps, batch in enumerate(batches(3), start=1):
        opt.step(closure_of(opt, compiled, batch))
        assert model.norm.num_batches_tracked == steps
    assert len(graphs) == 1


def test_a_compiled_closure():
    """Forward and backward compiled as one function, with the optimizer outside."""
    torch.compiler.reset()
    data = batches(3)
    plain, model = mlp(), mlp()
    train(llqr.SAM(sgd(plain), rho=0.05), plain, data)
    opt = llqr.SAM(sgd(model), rho=0.05)
    loss_of = torch.compile(lambda x, y: cross_entropy(model(x), y), backend="aot_eager")

    for x, y in data:

        def closure(x=x, y=y):
            opt.zero_grad()
            loss = loss_of(x, y)
            loss.backward()
            return loss

        opt.step(closure)
    torch.testing.assert_close(weights(model), weights(plain), rtol=1e-5, atol=1e-7)


def test_a_geometry_sees_through_compile():
    model = mlp()
    geometry = quick_geometry(torch.compile(model, backend="eager"))
    assert geometry.model is model
    assert list(geometry.parameters) == [name for name, _ in model.named_parameters()]
    state = geometry.state_dict()
    quick_geometry(model).load_state_dict(state)
    assert_same_bits(weights(geometry.model), weights(model))


@pytest.mark.parametrize("saved_compiled", [False, True])
def test_a_run_goes_on_with_parts_compiled_or_no_longer(saved_compiled):
    """Of `torch.compile(part)`, whose parameters have other names than those of the part."""
    data = batches(5)

    def start(compiled: bool) -> tuple[nn.Sequential, llqr.Optimizer]:
        torch.compiler.reset()
        model = mlp()
        if compiled:
            model[0] = torch.compile(model[0], backend="eager")
        return model, llqr.LLQRSAM(sgd(model), quick_geometry(model, "kfac", every=4), rho=0.05)

    model, opt = start(saved_compiled)
    train(opt, model, data[:2])
    other, resumed = start(not saved_compiled)
    with torch.no_grad():
        for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs)
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    train(opt, model, data[2:])
    train(resumed, other, data[2:])
    assert all(mine.equal(theirs) for mine, theirs in zip(other.parameters(), model.parameters(), strict=True))
    first, second = (made.geometry.metric.state_dict() for made in (opt, resumed))
    assert all(first[part].keys() == second[part].keys() for part in ("kinds", "factors"))

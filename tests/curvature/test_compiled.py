"""Parts of a model, or the loss, are compiled: differences run what is compiled, exact engines what was written."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from geometries import flat_geometry
from llqr import ENGINES
from references import DIFFERENCES, relative_error


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return x + self.linear(x).tanh()


def network():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(6, 4)).double()


def compiled_in_place(block, backend):
    block.compile(backend=backend)
    return block


def with_compiled_forward(block, backend):
    block.forward = torch.compile(block.forward, backend=backend)
    return block


@pytest.mark.parametrize(
    ("compiled_block", "engine", "divergence"),
    [
        *product([compiled_in_place], ENGINES, ["ngd"]),
        *product([compiled_in_place], ["double-backward", "finite-differences"], ["newton"]),
        *product([torch.compile], ["double-backward", "linearised", "one-sided-differences"], ["ngd"]),
        (with_compiled_forward, "double-backward", "newton"),
    ],
)
def test_compiled_blocks_give_the_same_metric(compiled_block, engine, divergence):
    torch._dynamo.reset()  # it compiles one piece of code a few times only, whoever asks
    batch = torch.randn(8, 6, dtype=torch.float64), torch.randint(4, (8,))
    plain, compiled = network(), network()
    calls = []

    def run_and_note(graph, _):
        def run(*tensors):
            calls.append(graph)
            return graph(*tensors)

        return run

    backend = aot_autograd(fw_compiler=run_and_note)
    for i in range(2):
        compiled[i] = compiled_block(compiled[i], backend=backend)
    settings, differences = {"divergence": divergence, "steps": 3, "ema": 0.0}, engine in DIFFERENCES
    made = [
        # All exact engines compute the same, and tracing takes long.
        flat_geometry(plain, F.cross_entropy, **settings, engine=engine if differences else "double-backward"),
        flat_geometry(compiled, F.cross_entropy, **settings, engine=engine),
    ]
    for geometry in made:
        assert geometry.refresh(batch).accepted
    first, second = (list(geometry.metric.named_factors().values()) for geometry in made)
    assert max(relative_error(ours, plain) for ours, plain in zip(second, first, strict=True)) < 1e-10
    assert bool(calls) == differences
    calls.clear()
    compiled(batch[0])
    assert calls, "the model is compiled again after a refresh"


WITHOUT_CLASS_2 = {"ignore_index": 2}


@pytest.mark.parametrize(
    "loss_fn", [F.cross_entropy, nn.CrossEntropyLoss(**WITHOUT_CLASS_2), partial(F.cross_entropy, **WITHOUT_CLASS_2)]
)
def test_a_compiled_loss_is_differentiated_twice_and_its_terms_are_counted(loss_fn):
    torch._dynamo.reset()
    batch = torch.randn(8, 6, dtype=torch.float64), torch.arange(8) % 4
    compiled = torch.compile(loss_fn, backend="aot_eager")
    factors = []
    for loss in (loss_fn, compiled):
        geometry = flat_geometry(network(), loss, steps=3, ema=0.0)
        assert geometry.refresh(batch).accepted
        factors.append(geometry.metric.named_factors())
    assert all(factor.equal(factors[1][name]) for name, factor in factors[0].items())


def test_a_compiled_sum_is_refused():
    with pytest.raises(ValueError, match="it is a sum"):
        flat_geometry(network(), torch.compile(partial(F.cross_entropy, reduction="sum"), backend="eager"))


class Gated(nn.Module):
    """Only a function in it is compiled, so that training and refreshes share its backward pass."""

    def __init__(self, gate):
        super().__init__()
        self.first, self.last, self.gate = nn.Linear(6, 6), nn.Linear(6, 4), gate

    def forward(self, x):
        return self.last(self.gate(self.first(x)))


def gate(x):
    return (x.exp().sin() * x.tanh()).cos() * x


@pytest.mark.parametrize("micro_batch", [None, 4])
@pytest.mark.parametrize("divergence", ["ngd", "newton"])
@pytest.mark.parametrize("engine", DIFFERENCES)
def test_compiled_code_that_gives_its_activations_away(engine, divergence, micro_batch):
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = Gated(gate).double()
    torch.manual_seed(0)
    compiled = Gated(torch.compile(gate, backend=aot_autograd(fw_compiler=lambda graph, _: graph.forward))).double()
    x, y = torch.randn(8, 6, dtype=torch.float64), torch.randint(4, (8,))
    F.cross_entropy(compiled(x), y).backward()
    with pytest.raises(RuntimeError, match="donated buffers"):
        F.cross_entropy(compiled(x), y).backward(retain_graph=True)
    settings = {"steps": 3, "ema": 0.0, "engine": engine, "micro_batch": micro_batch}
    made = [flat_geometry(model, F.cross_entropy, divergence=divergence, **settings) for model in (plain, compiled)]
    for geometry in made:
        for _ in range(2):
            assert geometry.refresh((x, y)).accepted
    first, second = (geometry.metric.named_factors() for geometry in made)
    assert max(relative_error(second[name], first[name]) for name in first) < 1e-10

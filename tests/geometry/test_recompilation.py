"""A compiled model is compiled once: no step and no refresh may change what its guards look at."""

import pytest
import torch
from torch import nn

import llqr
from geometries import flat_geometry
from traps.training import batches, closure_of, cross_entropy, sgd

STEPS = 7


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(5, 8), nn.BatchNorm1d(8)
        self.drop, self.last = nn.Dropout(0.1), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.drop(self.norm(self.first(x)).relu()))


@pytest.fixture
def compiled():
    """Calls the compiled graphs' makers; compiling the same function again for new guards is an error."""
    torch.compiler.reset()
    graphs = []

    def backend(graph, examples):
        graphs.append(graph)
        return graph.forward

    with torch._dynamo.config.patch(error_on_recompile=True):
        yield backend, graphs
    torch.compiler.reset()


def optimizer(name, model, structure="diagonal"):
    settings = {"rho": 0.05} if "sam" in name else {}
    if name.startswith("llqr"):
        settings["geometry"] = flat_geometry(
            model, cross_entropy, structure=structure, every=3, steps=3, engine="double-backward"
        )
    return llqr.build(name, sgd(model), **settings)


@pytest.mark.parametrize("of_wrapper", [True, False])
@pytest.mark.parametrize(
    ("name", "structure"),
    [("sam", None), ("fsam", None), ("llqr", "diagonal"), ("llqr+sam", "diagonal"), ("llqr+sam", "e-kfac")],
)
def test_steps_and_refreshes_do_not_recompile(name, structure, of_wrapper, compiled):
    backend, graphs = compiled
    model = Network()
    wrapper = torch.compile(model, backend=backend, fullgraph=True)
    opt = optimizer(name, wrapper if of_wrapper else model, structure)
    for batch in batches(STEPS):
        opt.step(closure_of(opt, wrapper, batch), batch=batch)
    assert len(graphs) == 1
    if opt.geometry is not None:
        assert (opt.geometry.refreshes, opt.geometry.failures) == (3, 0)


@pytest.mark.parametrize("name", ["sam", "llqr+sam"])
def test_nor_with_forward_and_backward_compiled(name):
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    model = Network()
    wrapper = torch.compile(model, backend="aot_eager", fullgraph=True)
    opt = optimizer(name, wrapper)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in batches(STEPS):
            opt.step(closure_of(opt, wrapper, batch), batch=batch)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_compiled_step_of_the_two_call_form_too(compiled):
    backend, graphs = compiled
    model = Network()
    wrapper = torch.compile(model, backend=backend, fullgraph=True)
    opt = optimizer("llqr+sam", wrapper)
    for x, y in batches(STEPS):
        cross_entropy(wrapper(x), y).backward()
        opt.first_step(batch=(x, y), zero_grad=True)
        cross_entropy(wrapper(x), y).backward()
        opt.second_step(zero_grad=True)
    assert len(graphs) == 1


def test_a_recompilation_would_be_an_error(compiled):
    backend, _ = compiled
    model = Network()
    wrapper = torch.compile(model, backend=backend)
    x = torch.randn(4, 5)
    wrapper(x)
    model.eval()
    with pytest.raises(torch._dynamo.exc.RecompileError):
        wrapper(x)

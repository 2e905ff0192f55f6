"""A training step compiled as a whole: the passes are compiled, steps and refreshes run as they were written."""

import pytest
import torch

import llqr

from .training import batches, closure_of, cross_entropy, mlp, quick_geometry, sgd, weights


def two_calls(opt, model):
    def step(x, y):
        cross_entropy(model(x), y).backward()
        opt.first_step(batch=(x, y))
        cross_entropy(model(x), y).backward()
        opt.second_step(zero_grad=True)

    return step


def with_closure(opt, model):
    return lambda x, y: opt.step(closure_of(opt, model, (x, y)), batch=(x, y))


def trained(make_step, **compiled):
    torch.compiler.reset()
    model = mlp(torch.float64)
    geometry = quick_geometry(model, "kfac", engine="auto")
    step = make_step(llqr.LLQRSAM(sgd(model), geometry, rho=0.1), model)
    step = torch.compile(step, **compiled) if compiled else step
    for x, y in batches(4, dtype=torch.float64):
        step(x, y)
    return weights(model) | geometry.metric.named_factors()


@pytest.mark.parametrize("make_step", [two_calls, with_closure])
def test_a_compiled_step_is_the_step_as_written(make_step):
    """torch would make forward derivatives of zero of those in a refresh, and compile them for a minute."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled, plain = trained(make_step, backend=backend), trained(make_step)
    for name, tensor in plain.items():
        torch.testing.assert_close(compiled[name], tensor, rtol=1e-12, atol=1e-14)
    assert len(graphs) == (2 if make_step is two_calls else 0), "the passes, and nothing of llqr"

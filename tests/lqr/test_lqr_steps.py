"""The Riccati step against the dense damped Newton, Gauss-Newton and natural-gradient steps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dense_steps import DIVERGENCES, NETWORKS, Problem, classification, relative
from llqr.lqr import NoMinimiserError, costs, exact_step, linearise, solve

ACTIVATIONS = [nn.Tanh, nn.ReLU, nn.GELU, nn.Identity]


@pytest.fixture(params=NETWORKS)
def problem(request: pytest.FixtureRequest) -> Problem:
    torch.manual_seed(0)
    return NETWORKS[request.param]()


def assert_step_is_dense(problem: Problem, divergence: str, scale: str | float | None) -> None:
    H = problem.curvature(divergence, scale)
    damping = problem.convex_damping(H)
    step = exact_step(
        problem.model,
        problem.loss_fn,
        problem.batch,
        divergence=divergence,
        damping=damping,
        curvature_scale=scale,
    )
    dense = -torch.linalg.solve(H + damping * torch.eye(len(H), dtype=H.dtype), problem.gradient)
    assert {name: value.shape for name, value in step.items()} == {n: p.shape for n, p in problem.trainable.items()}
    assert relative(problem.flat(step), dense) < 1e-8


@pytest.mark.parametrize(("divergence", "scale"), DIVERGENCES)
def test_step_equals_the_dense_step(problem: Problem, divergence: str, scale: str | float | None) -> None:
    assert_step_is_dense(problem, divergence, scale)


def test_costates_give_the_same_gradient_as_backward(problem: Problem) -> None:
    linear = linearise(problem.model, problem.loss_fn, problem.batch)
    loss = problem.loss_fn(problem.model(problem.inputs), problem.targets)
    loss.backward()
    assert torch.equal(linear.loss, loss.detach())
    for name, parameter in problem.model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(linear.gradient[name], parameter.grad, rtol=1e-11, atol=1e-14)
        else:
            assert name not in linear.gradient


def test_dynamics_are_those_of_the_network(problem: Problem) -> None:
    """Composing A_i and B_i gives the Jacobian of the outputs in all parameters."""
    linear = linearise(problem.model, problem.loss_fn, problem.batch)
    columns: list[torch.Tensor] = []
    downstream = torch.eye(linear.outputs.numel(), dtype=torch.float64)
    for stage in reversed(linear.stages):
        columns.insert(0, downstream @ stage.B)
        downstream = downstream @ stage.A
    dense = torch.func.jacrev(lambda t: problem.outputs(t).reshape(-1))(problem.theta)
    assert relative(torch.cat(columns, dim=1), dense) < 1e-12


def test_the_model_is_not_modified(problem: Problem) -> None:
    before = {name: value.clone() for name, value in problem.model.state_dict().items()}
    rng, inputs = torch.get_rng_state(), problem.inputs.clone()
    exact_step(problem.model, problem.loss_fn, problem.batch, divergence="newton", damping=100.0)
    assert all(torch.equal(before[name], value) for name, value in problem.model.state_dict().items())
    assert torch.equal(problem.inputs, inputs)
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(p.grad is None for p in problem.model.parameters())
    assert not any(m.training for m in problem.model.modules())


def test_a_list_of_stages_equals_the_sequential() -> None:
    torch.manual_seed(1)
    problem = NETWORKS["tanh"]()
    kwargs = {"divergence": "ngd", "damping": 0.1}
    whole = exact_step(problem.model, problem.loss_fn, problem.batch, **kwargs)
    listed = exact_step(list(problem.model), problem.loss_fn, problem.batch, **kwargs)
    assert whole.keys() == listed.keys()
    assert all(torch.equal(whole[name], listed[name]) for name in whole)


def test_how_the_network_is_cut_into_stages_does_not_matter() -> None:
    torch.manual_seed(2)
    problem = NETWORKS["tanh"]()
    a, b, c, d, e = problem.model
    nested = nn.Sequential(nn.Sequential(a, b, c), nn.Sequential(d, e)).eval()
    fine, coarse = (
        exact_step(model, problem.loss_fn, problem.batch, divergence="newton", damping=1.0)
        for model in (problem.model, nested)
    )
    assert list(coarse) == ["0.0.weight", "0.0.bias", "0.2.weight", "0.2.bias", "1.1.weight", "1.1.bias"]
    assert relative(torch.cat([v.flatten() for v in coarse.values()]), problem.flat(fine)) < 1e-10


def test_one_activation_module_used_twice_is_two_stages() -> None:
    torch.manual_seed(3)
    tanh = nn.Tanh()
    problem = classification(nn.Linear(3, 4), tanh, nn.Linear(4, 4), tanh, nn.Linear(4, 2), inputs=(5, 3), classes=2)
    assert len(linearise(problem.model, problem.loss_fn, problem.batch).stages) == 5
    assert_step_is_dense(problem, "newton", None)


def test_parameters_tied_inside_one_stage_count_once() -> None:
    torch.manual_seed(4)
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    problem = classification(nn.Sequential(first, nn.Tanh(), second), nn.Linear(3, 2), inputs=(5, 3), classes=2)
    assert "0.2.weight" not in linearise(problem.model, problem.loss_fn, problem.batch).gradient
    assert_step_is_dense(problem, "newton", None)


def test_gauss_newton_of_mean_cross_entropy_is_the_mean_fisher() -> None:
    """Label smoothing changes the gradient but not the Hessian in the logits."""
    torch.manual_seed(5)
    problem = NETWORKS["gelu, smoothed"]()
    linear = linearise(problem.model, problem.loss_fn, problem.batch)
    gauss_newton = costs(linear, "gauss-newton")
    torch.testing.assert_close(gauss_newton.Q_N, costs(linear, "ngd", curvature_scale="mean").Q_N)
    torch.testing.assert_close(len(problem.targets) * gauss_newton.Q_N, costs(linear, "ngd").Q_N)


def test_float32_follows_the_dtype_of_the_model() -> None:
    torch.manual_seed(6)
    problem = NETWORKS["tanh"]()
    double = exact_step(problem.model, problem.loss_fn, problem.batch, divergence="ngd", damping=0.5)
    single = exact_step(
        problem.model.float(), problem.loss_fn, (problem.inputs.float(), problem.targets), divergence="ngd", damping=0.5
    )
    assert {value.dtype for value in single.values()} == {torch.float32}
    assert relative(problem.flat(single).double(), problem.flat(double)) < 1e-4


@st.composite
def perceptrons(draw: st.DrawFn) -> Problem:
    widths = draw(st.lists(st.integers(1, 4), min_size=2, max_size=5))
    batch, classes = draw(st.integers(1, 5)), draw(st.integers(2, 4))
    stages: list[nn.Module] = []
    for before, after in zip(widths, [*widths[1:], classes], strict=True):
        stages += [nn.Linear(before, after, bias=draw(st.booleans())), draw(st.sampled_from(ACTIVATIONS))()]
    torch.manual_seed(draw(st.integers(0, 2**31)))
    return classification(
        *stages, inputs=(batch, widths[0]), classes=classes, smoothing=draw(st.sampled_from([0.0, 0.1]))
    )


@settings(max_examples=30, deadline=None)
@given(problem=perceptrons(), divergence=st.sampled_from(DIVERGENCES))
def test_random_depths_and_widths(problem: Problem, divergence: tuple[str, str | float | None]) -> None:
    for parameter in problem.model.parameters():
        nn.init.normal_(parameter, std=0.7)
    linear = linearise(problem.model, problem.loss_fn, problem.batch)
    torch.testing.assert_close(problem.flat(linear.gradient), problem.gradient, rtol=1e-10, atol=1e-13)
    if float(problem.gradient.norm()) > 1e-8:  # a dead ReLU network has no step to compare
        assert_step_is_dense(problem, *divergence)


@settings(max_examples=20, deadline=None)
@given(problem=perceptrons(), offset=st.sampled_from([-0.5, -1e-3, 1e-3, 0.5]))
def test_a_minimiser_is_found_exactly_when_the_damped_hessian_is_positive(problem: Problem, offset: float) -> None:
    smallest = float(torch.linalg.eigvalsh(problem.curvature("newton", None))[0])
    damping = max(0.0, -smallest + offset)
    lqr = costs(linearise(problem.model, problem.loss_fn, problem.batch), "newton", damping=damping)
    if smallest + damping > 1e-6:
        solve(lqr)
    elif smallest + damping < 1e-12:
        with pytest.raises(NoMinimiserError, match="damping"):
            solve(lqr)

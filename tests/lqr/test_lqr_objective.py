"""The relaxed objective through the layerwise rollout against the dense quadratic g.δ + ½ δ.H δ + ½ damping |δ|²."""

import pytest
import torch

from dense_steps import DIVERGENCES, NETWORKS, Problem
from llqr.lqr import LayerwiseLQR, costs, linearise, relaxed_objective, riccati, solve


@pytest.fixture(params=NETWORKS)
def problem(request: pytest.FixtureRequest) -> Problem:
    torch.manual_seed(0)
    return NETWORKS[request.param]()


def lqr_of(problem: Problem, divergence: str, scale: str | float | None, damping: float) -> LayerwiseLQR:
    linear = linearise(problem.model, problem.loss_fn, problem.batch)
    return costs(linear, divergence, damping=damping, curvature_scale=scale)


@pytest.mark.parametrize(("divergence", "scale"), DIVERGENCES)
def test_rollout_equals_the_dense_quadratic(problem: Problem, divergence: str, scale: str | float | None) -> None:
    g, H = problem.gradient, problem.curvature(divergence, scale)
    linear = linearise(problem.model, problem.loss_fn, problem.batch)
    for damping in (0.0, 0.3):
        lqr = costs(linear, divergence, damping=damping, curvature_scale=scale)
        for _ in range(4):
            delta = torch.randn_like(g)
            terms = torch.stack([g @ delta, delta @ H @ delta / 2, damping / 2 * delta @ delta])
            layerwise = relaxed_objective(lqr, problem.named(delta))
            # Relative to the terms: their sum may nearly cancel.
            assert abs(float(layerwise - terms.sum())) < 1e-10 * float(terms.abs().max())


def test_gradient_of_the_objective_is_the_residual(problem: Problem) -> None:
    """∂J/∂δ = g + H δ + damping δ, which determines H itself and not only its value along one direction."""
    g, H = problem.gradient, problem.curvature("newton", None)
    lqr = lqr_of(problem, "newton", None, 0.3)
    delta = torch.randn_like(g).requires_grad_()
    (residual,) = torch.autograd.grad(relaxed_objective(lqr, problem.named(delta)), delta)
    torch.testing.assert_close(residual, (g + H @ delta + 0.3 * delta).detach(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["layer norm", "batch norm over the batch"])
def test_newton_of_normalisation_layers_against_finite_differences(name: str) -> None:
    """The reference avoids automatic second derivatives, because torch.func.hessian is wrong for these layers."""
    torch.manual_seed(3)
    problem = NETWORKS[name]()
    lqr = lqr_of(problem, "newton", None, 0.0)
    delta, h = torch.nn.functional.normalize(torch.randn_like(problem.theta), dim=0), 1e-3

    def change(step: float) -> torch.Tensor:
        gradient_at = torch.func.grad(problem.loss)
        return gradient_at(problem.theta + step * delta) - gradient_at(problem.theta - step * delta)

    Hd = (8 * change(h) - change(2 * h)) / (12 * h)  # central differences of fourth order
    expected = problem.gradient @ delta + delta @ Hd / 2
    torch.testing.assert_close(relaxed_objective(lqr, problem.named(delta)), expected, rtol=1e-7, atol=0)


@pytest.mark.parametrize(("divergence", "scale"), DIVERGENCES)
def test_a_metric_is_scored_at_minus_u_g(divergence: str, scale: str | float | None) -> None:
    torch.manual_seed(1)
    problem = NETWORKS["convolutional"]()
    lqr = lqr_of(problem, divergence, scale, 0.2)
    g, H = problem.gradient, problem.curvature(divergence, scale)
    root = torch.randn(len(g), len(g), dtype=g.dtype) / len(g) ** 0.5
    U = root @ root.T
    delta = -U @ g
    expected = g @ delta + delta @ H @ delta / 2 + 0.1 * delta @ delta
    scored = relaxed_objective(lqr, problem.named(delta))
    torch.testing.assert_close(scored, expected, rtol=1e-10, atol=0)


def test_the_exact_step_is_the_best_and_its_value_is_half_the_slope(problem: Problem) -> None:
    H = problem.curvature("newton", None)
    lqr = lqr_of(problem, "newton", None, problem.convex_damping(H))
    step = solve(lqr)
    best = relaxed_objective(lqr, step)
    torch.testing.assert_close(best, problem.gradient @ problem.flat(step) / 2, rtol=1e-8, atol=0)
    for _ in range(4):
        nearby = {name: value + 1e-2 * torch.randn_like(value) for name, value in step.items()}
        assert relaxed_objective(lqr, nearby) > best


def test_cost_to_go_predicts_a_change_of_the_input() -> None:
    """P_0 and p_0 are the optimal value as a function of δx_0, here against the dense joint problem in (δx_0, δθ)."""
    torch.manual_seed(2)
    problem = NETWORKS["tanh"]()
    shape, n = problem.inputs.shape, problem.inputs.numel()

    def loss(z: torch.Tensor) -> torch.Tensor:
        outputs = torch.func.functional_call(problem.model, problem.named(z[n:]), (z[:n].reshape(shape),))
        return problem.loss_fn(outputs, problem.targets)

    z = torch.cat([problem.inputs.reshape(-1), problem.theta])
    H, g = torch.autograd.functional.hessian(loss, z), torch.func.grad(loss)(z)
    damping = problem.convex_damping(H[n:, n:])
    inverse = torch.linalg.inv(H[n:, n:] + damping * torch.eye(len(z) - n, dtype=z.dtype))
    first = riccati(lqr_of(problem, "newton", None, damping))[0]
    torch.testing.assert_close(first.P, H[:n, :n] - H[:n, n:] @ inverse @ H[n:, :n], rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(first.p, g[:n] - H[:n, n:] @ inverse @ g[n:], rtol=1e-8, atol=1e-10)

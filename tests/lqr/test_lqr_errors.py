"""Every input that the exact LQR cannot handle is refused with one sentence that names the argument."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dense_steps import NETWORKS
from llqr.lqr import (
    LayerwiseLQR,
    Linearisation,
    NoMinimiserError,
    costs,
    exact_step,
    linearise,
    relaxed_objective,
    solve,
)

torch.manual_seed(0)
INPUTS, TARGETS = torch.randn(5, 3, dtype=torch.float64), torch.tensor([0, 1, 0, 1, 1])


def mlp(*, activation: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), activation or nn.Tanh(), nn.Linear(4, 2)).double().eval()


def linearised(model: object, batch: object = (INPUTS, TARGETS), loss_fn: object = F.cross_entropy) -> Linearisation:
    return linearise(model, loss_fn, batch)


def lqr() -> LayerwiseLQR:
    return costs(linearised(mlp()), "ngd", damping=0.1)


@pytest.mark.parametrize("module", [nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Tanh()])
def test_training_mode(module: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"`model` is in training mode.*model\.eval\(\)"):
        linearised(mlp(activation=module).train())


def test_one_part_of_a_stage_in_training_mode() -> None:
    model = mlp(activation=nn.Sequential(nn.Tanh(), nn.Dropout(0.1)))
    model[1][1].train()
    with pytest.raises(ValueError, match=r"Stage '1'.*training mode"):
        linearised(model)


def test_dropout_and_batch_norm_work_in_eval_mode() -> None:
    model = mlp(activation=nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)))
    exact_step(model, F.cross_entropy, (INPUTS, TARGETS), divergence="ngd", damping=0.1)


def test_a_sequential_with_a_forward_of_its_own() -> None:
    class Residual(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(x)

    with pytest.raises(TypeError, match=r"must be an nn\.Sequential or a list of stages, got Residual"):
        linearised(Residual(nn.Linear(3, 3), nn.Tanh()).double().eval())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attention(dtype: torch.dtype) -> None:
    """Its fast path without gradients rounds otherwise, and its fused kernel has no second derivative."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 6, batch_first=True), nn.Flatten(), nn.Linear(24, 3))
    batch = torch.randn(4, 3, 8), torch.tensor([0, 1, 2, 0])
    plain, wide = (
        exact_step(
            model.to(kind).eval(), F.cross_entropy, (batch[0].to(kind), batch[1]), divergence="newton", damping=20
        )
        for kind in (dtype, torch.float64)
    )
    for name, step in plain.items():
        torch.testing.assert_close(step.double(), wide[name], rtol=1e-4, atol=1e-6)


def test_random_stage() -> None:
    class AlwaysDropout(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, 0.5, training=True)

    torch.manual_seed(0)
    with pytest.raises(
        ValueError, match=r"stage '1' \(AlwaysDropout\) of `model` is not a fixed map f_i: one input gave two"
    ):
        linearised(mlp(activation=AlwaysDropout()))


def test_stage_that_is_not_a_module() -> None:
    with pytest.raises(TypeError, match=r"Stage '1' of `model` is function, not an nn\.Module"):
        linearised([nn.Linear(3, 2).double().eval(), lambda x: x])


@pytest.mark.parametrize("model", [nn.Linear(3, 2).eval(), 3])
def test_model_that_is_not_a_list_of_stages(model: object) -> None:
    with pytest.raises(TypeError, match=r"`model` must be an nn\.Sequential or a list"):
        linearised(model)


def test_empty_model() -> None:
    with pytest.raises(ValueError, match="`model` has no stages"):
        linearised([])


def test_model_without_trainable_parameters() -> None:
    with pytest.raises(ValueError, match="`model` has no trainable parameters"):
        linearised(mlp().requires_grad_(False))


def test_stage_that_returns_a_tuple() -> None:
    with pytest.raises(TypeError, match=r"stage '0' \(LSTM\) of `model` returned tuple"):
        linearised(nn.Sequential(nn.LSTM(3, 2)).double().eval())


def test_parameters_tied_across_stages() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double().eval()
    model[2].weight = model[0].weight
    with pytest.raises(ValueError, match=r"'0\.weight' and '2\.weight' of `model` are tied"):
        linearised(model)


def test_frozen_parameters_may_be_tied() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double().eval()
    model[2].weight = model[0].weight.requires_grad_(False)
    assert set(linearised(model).gradient) == {"0.bias", "2.bias"}


@pytest.mark.filterwarnings("ignore:Complex modules:UserWarning")
def test_mixed_and_complex_dtypes() -> None:
    mixed = mlp()
    mixed[2].float()
    with pytest.raises(ValueError, match="`model` must share one real floating dtype"):
        linearised(mixed)
    with pytest.raises(ValueError, match="`model` must share one real floating dtype"):
        linearised(mlp().to(torch.complex128))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_dtype_without_a_cholesky_factorisation(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"`model` must share .*, float32 or float64, found {dtype}"):
        exact_step(mlp().to(dtype), F.cross_entropy, (INPUTS.to(dtype), TARGETS), divergence="ngd", damping=0.1)


def test_inputs_of_another_dtype() -> None:
    with pytest.raises(ValueError, match=r"stage '0' of `model` is torch\.float32"):
        linearised(mlp(), (INPUTS.float(), TARGETS))


def test_outputs_that_are_not_floats() -> None:
    class Decide(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.argmax(dim=1)

    with pytest.raises(ValueError, match="last stage of `model` must return a floating-point"):
        linearised(nn.Sequential(*mlp(), Decide()).eval())


@pytest.mark.parametrize("batch", [INPUTS, (INPUTS,), ("text", TARGETS)])
def test_batch_that_is_not_a_pair(batch: object) -> None:
    with pytest.raises(TypeError, match="`batch` must be a pair"):
        linearised(mlp(), batch)


def test_loss_that_is_not_a_scalar() -> None:
    with pytest.raises(ValueError, match="`loss_fn` must return a scalar"):
        linearised(mlp(), loss_fn=nn.CrossEntropyLoss(reduction="none"))


def test_loss_that_is_not_finite() -> None:
    with pytest.raises(ValueError, match="`loss_fn` returned nan"):
        linearised(mlp(), (INPUTS * float("nan"), TARGETS))


def test_problem_too_large() -> None:
    model = mlp()
    linearise(model, F.cross_entropy, (INPUTS, TARGETS), max_dimension=31)
    message = r"too large.*stage '0' \(Linear\) has a batch state of dimension 15 and 16 parameters.*max_dimension=30"
    with pytest.raises(ValueError, match=message):
        linearise(model, F.cross_entropy, (INPUTS, TARGETS), max_dimension=30)


def test_a_problem_too_large_is_refused_before_the_matrices_are_built() -> None:
    model = nn.Sequential(nn.Linear(3, 10**5)).double().eval()
    with pytest.raises(ValueError, match="`max_dimension`"):
        linearise(model, F.mse_loss, (INPUTS, torch.zeros(5, 10**5, dtype=torch.float64)))


def test_newton_without_enough_damping() -> None:
    torch.manual_seed(0)
    problem = NETWORKS["tanh"]()
    assert torch.linalg.eigvalsh(problem.curvature("newton", None))[0] < -0.05
    message = r"pivot of stage '\d' \(Linear\) is indefinite \(smallest eigenvalue -.*raise `damping` \(now 0\.05\)"
    with pytest.raises(NoMinimiserError, match=message):
        exact_step(problem.model, problem.loss_fn, problem.batch, divergence="newton", damping=0.05)


@pytest.mark.parametrize("divergence", ["gauss-newton", "ngd"])
def test_semidefinite_curvature_without_damping(divergence: str) -> None:
    """Softmax is invariant to a shift of all logits, so without damping the last bias is free along one direction."""
    with pytest.raises(NoMinimiserError, match=r"pivot of stage '2' \(Linear\) is singular.*raise `damping`"):
        exact_step(mlp(), F.cross_entropy, (INPUTS, TARGETS), divergence=divergence, damping=0.0)


def test_damping_lost_in_rounding() -> None:
    """Cholesky succeeds on pivots that are rounding errors; the step would be noise."""
    problem = costs(linearised(mlp()), "ngd", damping=1e-15)
    last = problem.stages[-1]
    torch.linalg.cholesky(last.R + last.B.T @ problem.Q_N @ last.B)
    with pytest.raises(NoMinimiserError, match="singular"):
        solve(problem)


def test_curvature_that_overflows() -> None:
    """|o - o*|^1.5 at o = o*: the loss and its gradient are 0, its Hessian is not finite."""
    model = mlp()
    linear = linearised(model, (INPUTS, model(INPUTS)), lambda out, best: (out - best).abs().pow(1.5).sum())
    assert not costs(linear, "gauss-newton").Q_N.isfinite().all()
    with pytest.raises(NoMinimiserError, match="not finite"):
        solve(costs(linear, "gauss-newton", damping=1.0))


@pytest.mark.parametrize("damping", [-1e-3, float("nan"), float("inf")])
def test_damping(damping: float) -> None:
    with pytest.raises(ValueError, match="`damping` must be a finite number >= 0"):
        costs(linearised(mlp()), "ngd", damping=damping)


def test_unknown_divergence() -> None:
    with pytest.raises(ValueError, match=re.escape("`divergence` must be one of newton, gauss-newton, ngd, got 'kl'")):
        costs(linearised(mlp()), "kl")


@pytest.mark.parametrize("scale", ["median", 0.0, -1.0, float("inf")])
def test_curvature_scale(scale: object) -> None:
    with pytest.raises(ValueError, match="`curvature_scale` must be 'sum', 'mean' or a positive number"):
        costs(linearised(mlp()), "ngd", curvature_scale=scale)


def test_curvature_scale_of_another_divergence() -> None:
    with pytest.raises(ValueError, match="`curvature_scale` applies to 'ngd' only"):
        costs(linearised(mlp()), "newton", curvature_scale="mean")


def test_ngd_of_outputs_that_are_not_class_scores() -> None:
    model = nn.Sequential(*mlp(), nn.Unflatten(1, (2, 1))).eval()
    linear = linearised(model, loss_fn=lambda out, y: F.cross_entropy(out[..., 0], y))
    with pytest.raises(ValueError, match=r"'ngd' needs outputs of shape \(batch, classes\), got \(5, 2, 1\)"):
        costs(linear, "ngd")


ONE_HOT = F.one_hot(TARGETS).double()


@pytest.mark.parametrize("loss_fn", [F.mse_loss, F.binary_cross_entropy_with_logits])
def test_ngd_of_a_loss_that_is_not_of_a_softmax(loss_fn: object) -> None:
    linear = linearised(mlp(), (INPUTS, ONE_HOT), loss_fn)
    with pytest.warns(UserWarning, match=r"`divergence` 'ngd' is the Fisher matrix of a softmax.*take 'gauss-newton'"):
        costs(linear, "ngd")


def test_ngd_of_a_loss_of_probabilities() -> None:
    """Log-probabilities, which tell the losses of a softmax, are outside its domain."""
    model = nn.Sequential(*mlp(), nn.Sigmoid()).eval()
    linear = linearised(model, (INPUTS, ONE_HOT), F.binary_cross_entropy)
    with pytest.warns(UserWarning, match="take 'gauss-newton'"):
        costs(linear, "ngd")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ngd_of_other_losses_of_a_softmax(dtype: torch.dtype, scale: float) -> None:
    """Smoothed and soft labels, class weights, and log-probabilities."""
    model, inputs = mlp().to(dtype), scale * INPUTS.to(dtype)
    weight = torch.tensor([1.0, 3.0], dtype=dtype)
    for loss_fn, targets in [
        (nn.CrossEntropyLoss(label_smoothing=0.1), TARGETS),
        (nn.CrossEntropyLoss(weight=weight, ignore_index=0), TARGETS),
        (F.cross_entropy, (0.8 * ONE_HOT + 0.1).to(dtype)),
    ]:
        costs(linearised(model, (inputs, targets), loss_fn), "ngd")
    normalised = nn.Sequential(*model, nn.LogSoftmax(dim=1)).eval()
    torch.testing.assert_close(
        costs(linearised(normalised, (inputs, TARGETS), F.nll_loss), "ngd").Q_N,
        costs(linearised(model, (inputs, TARGETS)), "ngd").Q_N,
    )


def test_delta_of_other_names_shapes_or_dtypes() -> None:
    problem = lqr()
    with pytest.raises(ValueError, match=r"`delta` must name.*missing \['2\.bias'\], unknown \['head'\]"):
        relaxed_objective(problem, {("head" if n == "2.bias" else n): g for n, g in problem.gradient.items()})
    with pytest.raises(ValueError, match=r"`delta\['0\.weight'\]` must be torch\.float64 of shape \(4, 3\)"):
        relaxed_objective(problem, problem.gradient | {"0.weight": torch.zeros(3, 4, dtype=torch.float64)})
    with pytest.raises(ValueError, match=r"`delta\['0\.bias'\]` must be torch\.float64"):
        relaxed_objective(problem, problem.gradient | {"0.bias": torch.zeros(4)})

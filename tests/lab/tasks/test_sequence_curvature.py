"""`H v` on the sequence models against dense float64 references: two layers of width 16, tied, padded."""

import functools
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import llqr
from geometries import flat_geometry
from llqr.curvature import NEWTON, NGD, Problem, choose_engine, frozen
from llqr.lab.models.transformer import TranslationTransformer, differentiable_forward
from references import (
    DIFFERENCES,
    TOLERANCE,
    dense_gradient,
    flat,
    jacobian,
    quadratic_model,
    relative_error,
    trainable,
)
from small_models import tokens_loss

pytestmark = pytest.mark.slow

PAD, VOCABULARY = 0, 7
MODELS = ["post", "pre", "all tied"]


EXACT = [engine for engine in TOLERANCE if engine not in DIFFERENCES]
exact_engines = pytest.mark.parametrize(("name", "engine"), [(name, engine) for name in MODELS for engine in EXACT])


def build(name: str, width: int = 16) -> nn.Module:
    torch.manual_seed(6)
    norm, tie = ("pre", "decoder") if name == "pre" else ("post", "all" if name == "all tied" else "decoder")
    model = TranslationTransformer(
        VOCABULARY, width=width, feed_forward=width, heads=2, layers=2, norm=norm, tie=tie, max_length=8
    )
    with torch.no_grad():
        for parameter in model.parameters():  # the row of padding too: training moves it where it is tied
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.double().eval()


def batch() -> tuple[tuple[Tensor, ...], Tensor]:
    """Rows of several lengths, one of padding alone; 6 of 12 targets are there."""
    previous = torch.tensor([[1, 4, 5, 6], [1, 3, PAD, PAD], [PAD] * 4])
    targets = torch.tensor([[4, 5, 6, 2], [3, 2, PAD, PAD], [PAD] * 4])
    return (torch.tensor([[5, 3, 2], [6, 2, PAD], [PAD] * 3]), previous), targets


LOSS = functools.partial(tokens_loss, ignore_index=PAD, label_smoothing=0.1)


def problem_of(model: nn.Module, forward=differentiable_forward) -> Problem:
    return Problem(model, LOSS, batch(), trainable(model), forward=forward)


@functools.cache
def dense_outputs(name: str) -> tuple[Tensor, Tensor]:
    """`J`, a row for every logit, and `Q = diag p - p p^T` of every token, zero for padding."""
    model = build(name)
    inputs, targets = batch()
    outputs = differentiable_forward(model, inputs)
    j = jacobian(outputs, list(trainable(model).values()))
    p = outputs.detach().flatten(0, 1).softmax(-1)
    q = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    return j, q * (targets != PAD).flatten()[:, None, None]


def random_direction(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.randn_like(parameter) for name, parameter in trainable(model).items()}


@exact_engines
def test_natural_gradient_products_equal_the_dense_reference(name, engine):
    model = build(name)
    j, q = dense_outputs(name)
    with frozen(model, torch.device("cpu")), torch.no_grad():
        curvature = quadratic_model(problem_of(model), NGD, engine)
        for _ in range(2):
            v = random_direction(model)
            expected = j.T @ (q @ (j @ flat(v)).view(-1, VOCABULARY, 1)).flatten()
            assert relative_error(flat(curvature.product(v)), expected) < 1e-10
    with sdpa_kernel(SDPBackend.MATH):
        gradient = dense_gradient(model, LOSS, batch())
    assert relative_error(flat(curvature.gradient), gradient) < 1e-12


def slope_of(model: nn.Module) -> Tensor:
    """The gradient of the mean loss, with a graph behind it."""
    inputs, targets = batch()
    loss = LOSS(differentiable_forward(model, inputs), targets)
    parts = torch.autograd.grad(loss, list(trainable(model).values()), create_graph=True)
    return torch.cat([part.reshape(-1) for part in parts])


@exact_engines
@pytest.mark.parametrize("stride", [127, 1])
def test_newton_products_equal_rows_of_the_dense_hessian(name, engine, stride):
    """One backward pass a row of the Hessian: every row if there is time, otherwise some of every matrix."""
    model = build(name)
    v = random_direction(model)
    with frozen(model, torch.device("cpu")), torch.no_grad():
        product = flat(quadratic_model(problem_of(model), NEWTON, engine).product(v))
    wrt, slope = list(trainable(model).values()), slope_of(model)
    rows = torch.arange(0, len(slope), stride)
    expected = torch.stack([jacobian(slope[row], wrt)[0] @ flat(v) for row in rows])
    assert relative_error(product[rows], expected) < 1e-10


@exact_engines
def test_newton_products_equal_reverse_mode_twice(name, engine):
    """The whole product, from a graph of plain autograd."""
    model = build(name)
    v = random_direction(model)
    parts = torch.autograd.grad(slope_of(model) @ flat(v), list(trainable(model).values()))
    with frozen(model, torch.device("cpu")), torch.no_grad():
        product = quadratic_model(problem_of(model), NEWTON, engine).product(v)
    assert relative_error(flat(product), torch.cat([part.reshape(-1) for part in parts])) < 1e-10


@pytest.mark.parametrize("divergence", [NGD, NEWTON], ids=lambda d: d.name)
@pytest.mark.parametrize("name", ["post", "pre"])
def test_padding_that_is_ignored_has_no_curvature(name, divergence):
    """More rows of padding and longer ones: the same products."""
    model = build(name)
    inputs, targets = batch()

    def padded(part: Tensor) -> Tensor:
        return nn.functional.pad(part, (0, 1, 0, 2), value=PAD)

    v = random_direction(model)
    batches = (inputs, targets), (tuple(padded(part) for part in inputs), padded(targets))
    with frozen(model, torch.device("cpu")), torch.no_grad():
        problems = [Problem(model, LOSS, batch, trainable(model), forward=differentiable_forward) for batch in batches]
        few, many = (flat(quadratic_model(problem, divergence, "forward").product(v)) for problem in problems)
    assert relative_error(many, few) < 1e-10


@pytest.mark.parametrize("divergence", [NGD, NEWTON], ids=lambda d: d.name)
@pytest.mark.parametrize("name", ["post", "pre"])
def test_an_exact_engine_is_chosen_where_attention_is_differentiable(name, divergence):
    """The fused kernel leaves finite differences; composed of elementary operations it has exact products."""
    model = build(name)
    with frozen(model, torch.device("cpu")), torch.no_grad():
        exact, refused = choose_engine(problem_of(model), divergence)
        fused, said = choose_engine(problem_of(model, forward=None), divergence)
        assert (exact, refused) == ("double-backward", [])
        assert fused == "finite-differences"
        assert all("flash_attention" in sentence for sentence in said)
        v = random_direction(model)
        expected = flat(quadratic_model(problem_of(model), divergence, exact).product(v))
        approximate = flat(quadratic_model(problem_of(model, forward=None), divergence, fused).product(v))
    assert relative_error(approximate, expected) < 1e-4


@pytest.mark.parametrize("divergence", ["ngd", "newton"])
@pytest.mark.parametrize("name", ["post", "pre"])
@pytest.mark.parametrize("structure", sorted(llqr.STRUCTURES.keys() - {"identity"}))
def test_every_structure_is_learned(name, structure, divergence):
    model = build(name, width=8)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    geometry = flat_geometry(
        model, LOSS, structure=structure, divergence=divergence, steps=2, forward=differentiable_forward
    )
    result = geometry.refresh(batch())
    assert result.accepted, result.reason
    assert result.engine == "double-backward"
    assert result.objective_after < result.objective_before
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_vocabulary_too_large_for_a_factor_gets_a_cheaper_structure_and_says_so():
    model = TranslationTransformer(40, width=8, feed_forward=8, heads=2, layers=1)
    with pytest.warns(UserWarning, match=r"max_side=32: kfac -> diag-kfac for source_embedding\.weight \(40, 8\)"):
        geometry = flat_geometry(model, LOSS, structure="kfac", steps=2, max_side=32, forward=differentiable_forward)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert geometry.refresh(batch()).accepted


def test_a_refresh_under_autocast():
    model = build("post").float()
    exact, rounded = (
        flat_geometry(model, LOSS, structure="diag-kfac", steps=5, forward=differentiable_forward, autocast=dtype)
        for dtype in (None, torch.bfloat16)
    )
    results = [geometry.refresh(batch()) for geometry in (exact, rounded)]
    assert [result.engine for result in results] == ["double-backward", "double-backward"]
    assert all(result.accepted for result in results)
    assert results[1].objective_after == pytest.approx(results[0].objective_after, rel=0.05)

"""Which engine is chosen, and what engines do with models that are not as usual."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import llqr
from geometries import flat_geometry
from llqr.curvature import NEWTON, NGD, Problem, choose_engine
from references import (
    DIFFERENCES,
    TOLERANCE,
    dense_fisher,
    dense_newton,
    flat,
    quadratic_model,
    relative_error,
    trainable,
)
from small_models import Case, case

EXACT = [name for name in llqr.ENGINES if name not in DIFFERENCES]


def geometry_of(drawn, **options):
    return flat_geometry(drawn.model, drawn.loss_fn, steps=2, **options)


def problem_of(drawn, **options):
    return Problem(drawn.model, drawn.loss_fn, drawn.batch, trainable(drawn.model), **options)


def curvature_of(drawn, divergence, engine):
    with torch.no_grad():
        return quadratic_model(problem_of(drawn), divergence, engine)


# -- choosing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "batch-norm-cnn", "vit"])
def test_auto_takes_an_exact_engine_where_there_is_one(name):
    drawn = case(name)
    geometry = geometry_of(drawn)
    with warnings.catch_warnings():
        warnings.simplefilter("error", llqr.RefreshWarning)
        refresh = geometry.refresh(drawn.batch)
    assert refresh.engine == geometry.engine
    assert refresh.engine in EXACT


@pytest.mark.parametrize(
    ("name", "micro_batch", "first"),
    [("mlp", None, "double-backward"), ("mlp", 4, "forward"), ("batch-norm-cnn", None, "forward")],
)
def test_auto_takes_the_cheaper_exact_engine(name, micro_batch, first):
    problem = problem_of(case(name), micro_batch=micro_batch)
    with torch.no_grad():
        assert choose_engine(problem, NGD) == (first, [])


def test_auto_takes_forward_mode_where_there_is_no_second_backward_pass():
    class Once(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, grad):
            return grad

        @staticmethod
        def jvp(ctx, tangent):
            return tangent.clone()

    drawn = case("mlp")
    model = nn.Sequential(drawn.model, nn.Identity())
    model[1].forward = Once.apply
    with torch.no_grad():
        engine, refused = choose_engine(problem_of(Case(model, drawn.loss_fn, drawn.batch)), NGD)
    assert engine == "forward"
    assert refused[0].startswith("double-backward: ")


def test_auto_falls_back_on_fused_attention_and_says_so_once():
    drawn = case("vit-kernel")
    geometry = geometry_of(drawn, every=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert geometry.refresh(drawn.batch).engine == "finite-differences"
            geometry.advance()
    (warning,) = [w for w in caught if w.category is llqr.RefreshWarning]
    assert "engine: chose finite-differences, which is approximate, because" in str(warning.message)
    assert warning.filename == __file__  # it points at who called refresh
    for engine in ("forward", "double-backward"):
        assert f"{engine}: " in str(warning.message)


def test_an_engine_given_by_name_runs_or_fails():
    drawn = case("vit-kernel")
    with warnings.catch_warnings():
        warnings.simplefilter("error", llqr.RefreshWarning)
        assert geometry_of(drawn, engine="finite-differences").refresh(drawn.batch).engine == "finite-differences"
    for engine in ("double-backward", "forward"):
        lacking = rf"^engine: torch lacks derivatives that '{engine}' needs here .* choose 'auto'"
        with pytest.raises(RuntimeError, match=lacking):
            geometry_of(drawn, engine=engine).refresh(drawn.batch)


def test_a_dtype_error_in_the_loss_names_the_loss():
    def loss_fn(outputs, targets):
        raise RuntimeError("\"nll_loss_cpu\" not implemented for 'Half'")

    geometry = llqr.Geometry(torch.nn.Linear(4, 3), loss_fn, runtime=llqr.Runtime(engine="forward"))
    with pytest.raises(RuntimeError, match=r'^loss_fn: .*"nll_loss_cpu" not implemented'):
        geometry.refresh((torch.randn(8, 4), torch.zeros(8, dtype=torch.long)))


def test_an_unknown_engine_lists_the_known_ones():
    drawn = case("mlp")
    with pytest.raises(ValueError, match="engine: unknown 'reverse'; choose auto or one of forward, double-b"):
        geometry_of(drawn, engine="reverse").refresh(drawn.batch)


def test_a_model_that_does_not_run_says_why():
    drawn = case("mlp")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        geometry_of(drawn).refresh((torch.randn(3, 5, dtype=torch.float64), drawn.batch[1][:3]))
    assert isinstance(raised.value.__cause__, RuntimeError)


class Stopped(nn.Module):
    """Holds a part of its computation constant by `torch.no_grad`, which forward mode does not see."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 5).double(), nn.Linear(5, 3).double()

    def forward(self, x):
        h = self.first(x)
        with torch.no_grad():
            gate = h.sigmoid()
        return self.last(h * gate)


@pytest.mark.parametrize("divergence", [NGD, NEWTON], ids=lambda d: d.name)
def test_auto_rejects_an_engine_that_differentiates_through_no_grad(divergence):
    drawn = Case(Stopped(), F.cross_entropy, case("mlp").batch)
    v = {name: torch.randn_like(p) for name, p in trainable(drawn.model).items()}
    if divergence is NGD:
        dense = dense_fisher(drawn.model, drawn.batch[0])
    else:
        dense = dense_newton(drawn.model, drawn.loss_fn, drawn.batch)
    with torch.no_grad():
        # In pieces, forward mode is tried first.
        engine, refused = choose_engine(problem_of(drawn, micro_batch=64), divergence)
        product = quadratic_model(problem_of(drawn), divergence, engine).product(v)
    assert engine == "double-backward"
    assert "forward and backward derivatives of this model disagree" in refused[0]
    assert relative_error(flat(product), dense @ flat(v)) < 1e-10


# -- unusual models ----------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """An unused parameter, a frozen one, a number, a tied one, and one used twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.unused = nn.Parameter(torch.randn(3))
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.second.bias.requires_grad_(False)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        return self.temperature * self.last(self.second(self.first(x).tanh()).tanh()) / self.temperature.exp()


@pytest.mark.parametrize("divergence", [NGD, NEWTON], ids=lambda d: d.name)
@pytest.mark.parametrize("engine", TOLERANCE)
def test_unused_frozen_tied_and_0d_parameters(engine, divergence):
    drawn = Case(Odd().double(), F.cross_entropy, case("mlp").batch)
    parameters = trainable(drawn.model)
    assert set(parameters) == {"unused", "first.weight", "first.bias", "temperature", "last.weight", "last.bias"}
    curvature = curvature_of(drawn, divergence, engine)
    v = {name: torch.randn_like(p) for name, p in parameters.items()}
    with torch.no_grad():
        product = curvature.product(v)
    if divergence is NGD:
        dense = dense_fisher(drawn.model, drawn.batch[0])
    else:
        dense = dense_newton(drawn.model, drawn.loss_fn, drawn.batch)
    assert product["unused"].equal(torch.zeros(3, dtype=torch.float64))
    assert product["temperature"].shape == ()
    assert relative_error(flat(product), dense @ flat(v)) < TOLERANCE[engine]


@pytest.mark.parametrize("engine", EXACT)
def test_a_model_that_is_linear_in_its_weights_has_no_second_derivatives(engine):
    """Its gradient in the weights does not depend on them, so that there is no graph for a second backward pass."""
    torch.manual_seed(0)
    drawn = Case(nn.Linear(4, 3).double(), F.cross_entropy, case("mlp").batch)
    curvature = curvature_of(drawn, NEWTON, engine)
    v = {name: torch.randn_like(p) for name, p in trainable(drawn.model).items()}
    with torch.no_grad():
        product = flat(curvature.product(v))
    assert relative_error(product, dense_newton(drawn.model, drawn.loss_fn, drawn.batch) @ flat(v)) < TOLERANCE[engine]


@pytest.mark.parametrize("structure", ["diagonal", "e-kfac", "dense", "scalar"])
def test_a_parameter_without_a_gradient_keeps_the_identity(structure):
    drawn = Case(Odd().double(), F.cross_entropy, case("mlp").batch)
    geometry = geometry_of(drawn, structure=structure, lr=0.1, ema=0.0, engine="double-backward")
    assert geometry.refresh(drawn.batch).accepted
    ones = {name: torch.ones_like(p) for name, p in geometry.parameters.items()}
    moved = geometry.metric.apply(ones)
    assert moved["unused"].equal(ones["unused"])
    assert not moved["last.weight"].equal(ones["last.weight"])


class Energy(nn.Module):
    """One parameter, no batch dimension, a number for an output."""

    def __init__(self):
        super().__init__()
        self.theta = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))

    def forward(self, x):
        return (self.theta * x).sin().sum()


@pytest.mark.parametrize("engine", TOLERANCE)
def test_an_output_without_a_batch_dimension(engine):
    x = torch.tensor([0.3, 0.7], dtype=torch.float64)
    drawn = Case(Energy(), lambda z, t: (z - t) ** 2, (x, torch.tensor(0.5, dtype=torch.float64)))
    j = x * (drawn.model.theta.detach() * x).cos()
    v = {"theta": torch.randn(2, dtype=torch.float64)}
    with torch.no_grad():
        product = curvature_of(drawn, NGD, engine).product(v)["theta"]
    assert relative_error(product, 2 * j * (j @ v["theta"])) < TOLERANCE[engine]
    assert geometry_of(drawn, engine=engine).refresh(drawn.batch).accepted


def test_sparse_gradients_are_refused_by_name():
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 3))
    geometry = flat_geometry(model, F.cross_entropy, steps=2)
    with pytest.raises(TypeError, match=r"model: the gradient of parameter '0.weight' is sparse"):
        geometry.refresh((torch.randint(5, (7,)), torch.randint(3, (7,))))


def test_mixed_dtypes_in_one_model():
    class Cast(nn.Module):
        def forward(self, x):
            return x.float()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6).bfloat16(), nn.Tanh(), Cast(), nn.Linear(6, 3))
    batch = torch.randn(8, 4).bfloat16(), torch.randint(3, (8,))
    for structure in ("e-kfac", "scalar", "dense"):
        geometry = flat_geometry(model, F.cross_entropy, structure=structure, steps=5, lr=0.05, ema=0.0)
        assert geometry.refresh(batch).accepted
        moved = geometry.metric.apply({name: torch.ones_like(p) for name, p in geometry.parameters.items()})
        assert {name: part.dtype for name, part in moved.items()} == {
            n: p.dtype for n, p in geometry.parameters.items()
        }


def test_a_refresh_linearises_once():
    """However many products: one pass to linearise, none a product for double backward."""
    drawn, calls = case("mlp"), []
    drawn.model.register_forward_hook(lambda *_: calls.append(1))
    counts = {}
    for steps in (1, 9):
        geometry = flat_geometry(drawn.model, F.cross_entropy, steps=steps, engine="double-backward")
        geometry.refresh(drawn.batch)  # the first one also tries the model and the loss out
        calls.clear()
        geometry.refresh(drawn.batch)
        counts[steps] = len(calls)
    assert counts[1] == counts[9] == 1


def test_compiled_models_are_seen_through():
    drawn = case("mlp")
    plain = geometry_of(drawn, engine="double-backward")
    compiled = flat_geometry(torch.compile(drawn.model), F.cross_entropy, steps=2, engine="double-backward")
    assert list(compiled.parameters) == list(plain.parameters)
    plain.refresh(drawn.batch)
    compiled.refresh(drawn.batch)
    for name, factor in plain.metric.named_factors().items():
        assert factor.equal(compiled.metric.named_factors()[name])


def test_a_single_parameter_model():
    model = nn.Linear(1, 1, bias=False)
    geometry = flat_geometry(model, F.mse_loss, structure="kfac", steps=2)
    assert geometry.refresh((torch.ones(3, 1), torch.zeros(3, 1))).accepted


def test_autocast_rounding_is_not_a_disagreement():
    """Autocast rounds forward and backward passes differently; the exact engine is still taken."""
    drawn = case("mlp")
    model, batch = drawn.model.float(), (drawn.batch[0].float(), drawn.batch[1])
    problem = Problem(model, F.cross_entropy, batch, trainable(model), autocast=torch.bfloat16)
    with torch.no_grad():
        engine, refused = choose_engine(problem, NGD)
    assert refused == []
    assert engine in EXACT


# -- low precision -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("divergence", ["ngd", pytest.param("newton", marks=pytest.mark.slow)])
@pytest.mark.parametrize("engine", ["linearised", "forward", "double-backward"])
def test_exact_engines_under_autocast_are_near_full_precision(engine, divergence):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Tanh(), nn.Flatten(), nn.Linear(128, 5)).eval()
    batch = torch.randn(16, 3, 6, 6), torch.randint(5, (16,))
    products = []
    for autocast, own in ((None, "double-backward"), (torch.bfloat16, engine)):
        problem = Problem(model, F.cross_entropy, batch, trainable(model), autocast=autocast)
        with torch.no_grad():
            curvature = quadratic_model(problem, llqr.curvature.divergence_named(divergence), own)
            products.append(curvature.product({name: p.detach() for name, p in trainable(model).items()}))
    assert {part.dtype for part in products[1].values()} == {torch.float32}
    assert 1e-5 < relative_error(flat(products[1]), flat(products[0])) < 0.02


@pytest.mark.skipif(not torch.cuda.is_available(), reason="what autocast makes of a normalisation needs a GPU")
@pytest.mark.parametrize("engine", ["linearised", "forward", "double-backward"])
def test_newton_under_autocast_on_a_gpu(engine):
    """Tangents of a normalisation's backward pass are wider there than what the convolution before it takes."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Tanh(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 16, 5)).eval().cuda()
    batch = torch.randn(16, 3, 8, 8).cuda(), torch.randint(5, (16,)).cuda()
    products = []
    for autocast in (None, torch.bfloat16):
        problem = Problem(model, F.cross_entropy, batch, trainable(model), autocast=autocast)
        with torch.no_grad():
            curvature = quadratic_model(problem, llqr.curvature.divergence_named("newton"), engine)
            products.append(flat(curvature.product({name: p.detach() for name, p in trainable(model).items()})))
    assert 1e-5 < relative_error(products[1], products[0]) < 0.05


def test_an_engine_without_forward_mode_says_so():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))

    geometry = flat_geometry(Attention(), F.cross_entropy, engine="forward")
    with pytest.raises(RuntimeError, match="engine: torch lacks derivatives that 'forward' needs here"):
        geometry.refresh((torch.randn(5, 3, 4), torch.randint(3, (5,))))

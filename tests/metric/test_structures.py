"""Every structure against its dense form in float64: apply, pull-back, clipping, bounds, packing, names, storage."""

import functools
import itertools
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dense_blocks import applied_to_basis, dense_blocks
from llqr.metric import STRUCTURES, Block, Flat, Structure
from llqr.metric.structure import ROW, wide_product
from references import relative_error

KINDS = sorted(STRUCTURES.keys() - {"identity"})  # those that learn
STACKED = [kind for kind in KINDS if not issubclass(STRUCTURES[kind], Flat)]
FLAT = [kind for kind in KINDS if issubclass(STRUCTURES[kind], Flat)]
POSITIVE = ["kfac-psd", "e-kfac-psd"]
KERNEL = (2, 1)
CPU = torch.device("cpu")
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

sides = st.integers(1, 5)
seeds = st.integers(0, 2**31 - 1)


def block(name, layer, shape):
    return Block(name, name, layer, shape, shape, torch.empty(shape).stride(), None, torch.float64, CPU)


def convolution(name, layer, m, n):
    """The weight of a convolution from `n` to `m` channels."""
    native = (m, n, *KERNEL)
    shape, strides = (m, n * prod(KERNEL)), torch.empty(native).stride()
    return Block(name, name, layer, shape, native, strides, None, torch.float64, CPU, prod(KERNEL))


def group_of(kind, k=2, m=3, n=4):
    """`k` matrices `(m, n)`, or convolutions for the structure that is made for them.

    In flat structures each has a bias beside it, and there is one more vector at the end.
    """
    weight = (lambda name, layer, shape: convolution(name, layer, *shape)) if kind == "e-kfac-channels" else block
    matrices = [weight(f"{i}.weight", str(i), (m, n)) for i in range(k)]
    if kind in STACKED:
        return STRUCTURES[kind](matrices)
    biases = [block(f"{i}.bias", str(i), (m,)) for i in range(k)]
    return STRUCTURES[kind]([*matrices, *biases, block("scale", "scale", (n,))])


def random_factors(group, seed=0, spread=0.5):
    generator = torch.Generator().manual_seed(seed)
    identity = group.identity(torch.float64, CPU)
    return {
        name: factor + spread * torch.randn(factor.shape, generator=generator, dtype=torch.float64)
        for name, factor in identity.items()
    }


def random_packed(group, seed=0):
    generator = torch.Generator().manual_seed(seed + 1)
    return group.pack([torch.randn(b.native, generator=generator, dtype=torch.float64) for b in group.blocks])


def flat_blocks(group, packed):
    return [piece.reshape(-1) for piece in group.unpack(packed)]


# -- the action --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@given(k=st.integers(1, 3), m=sides, n=sides, seed=seeds)
def test_apply_equals_the_dense_matrix(kind, k, m, n, seed):
    group = group_of(kind, k, m, n)
    factors, g = random_factors(group, seed), random_packed(group, seed)
    applied = group.apply(factors, g)
    assert applied.shape == g.shape
    matrices = dense_blocks(group, factors)
    for actual, matrix, piece in zip(flat_blocks(group, applied), matrices, flat_blocks(group, g), strict=True):
        assert relative_error(actual, matrix @ piece) < 1e-12


def one_sided(f, g):
    """Only the shorter side is rotated."""
    q, s = f["basis"], f["scale"]
    return (s * (g @ q)) @ q.T if g.shape[1] <= g.shape[0] else q @ (s * (q.T @ g))


def channels(f, g):
    """Position by position: the basis of the input channels is the same for all of them."""
    scale, lifted = f["scale"].view(g.shape), torch.empty_like(g)
    for i, j in itertools.product(*map(range, KERNEL)):
        rotated = f["out"].T @ g[:, :, i, j] @ f["in"]
        lifted[:, :, i, j] = f["out"] @ (scale[:, :, i, j] * rotated) @ f["in"].T
    return lifted


# The formulas, one block at a time, with G in its native shape: (m, n), or (m, n, kh, kw) for a convolution.
FORMULAS = {
    "kfac": lambda f, g: f["out"] @ g @ f["in"].T,
    "kfac-psd": lambda f, g: f["out"] @ f["out"].T @ g @ f["in"] @ f["in"].T,
    "e-kfac": lambda f, g: f["out"] @ (f["scale"] * (f["out"].T @ g @ f["in"])) @ f["in"].T,
    "e-kfac-psd": lambda f, g: f["out"] @ (f["scale"] ** 2 * (f["out"].T @ g @ f["in"])) @ f["in"].T,
    "e-kfac-one-sided": one_sided,
    "e-kfac-channels": channels,
    "diag-kfac": lambda f, g: torch.diag(f["out"]) @ g @ torch.diag(f["in"]),
    "dense": lambda f, g: ((f["dense"] + f["dense"].T) / 2 @ g.reshape(-1)).reshape(g.shape),
    "diagonal": lambda f, g: f[""] * g,
}


@pytest.mark.parametrize(("m", "n"), [(3, 4), (4, 3), (3, 3)])
@pytest.mark.parametrize("kind", FORMULAS)
def test_apply_is_the_formula(kind, m, n):
    group = group_of(kind, m=m, n=n)
    factors, g = random_factors(group), random_packed(group)
    named = dict(group.named(group.reordered(factors, to_memory=False)))
    for b, piece, actual in zip(group.blocks, group.unpack(g), group.unpack(group.apply(factors, g)), strict=True):
        own = {name.removeprefix(b.name).lstrip("/"): f for name, f in named.items() if name.startswith(b.name)}
        assert relative_error(actual, FORMULAS[kind](own, piece)) < 1e-12


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_low_precision_stacks_multiply_into_float32(dtype, device):
    a, b = (torch.randn(3, 16, 16, device=device).to(dtype) for _ in range(2))
    product, exact = wide_product(a, b), a.double() @ b.double()
    assert product.dtype == torch.promote_types(dtype, torch.float32)
    # Without such a product, the result is rounded to the operands' dtype once.
    rounding = 2 * torch.finfo(dtype).eps if device == "cpu" else 1e-6
    assert relative_error(product, exact) < rounding


def test_scalar_is_one_number_per_layer():
    group = group_of("scalar")
    factors, g = random_factors(group), random_packed(group)
    named = dict(group.named(factors))
    assert set(named) == {"0", "1", "scale"}
    for b, piece, actual in zip(group.blocks, group.unpack(g), group.unpack(group.apply(factors, g)), strict=True):
        assert relative_error(actual, named[b.layer] * piece) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
@given(seed=seeds, a=st.floats(-3, 3), b=st.floats(-3, 3))
def test_apply_is_linear(kind, seed, a, b):
    group = group_of(kind)
    factors = random_factors(group, seed)
    x, y = random_packed(group, seed), random_packed(group, seed + 7)
    combined = group.apply(factors, a * x + b * y)
    expected = a * group.apply(factors, x) + b * group.apply(factors, y)
    torch.testing.assert_close(combined, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@given(seed=seeds, number=st.floats(0.1, 10))
def test_times_multiplies_u(kind, seed, number):
    group = group_of(kind)
    factors, g = random_factors(group, seed), random_packed(group, seed)
    scaled = group.apply(group.times(factors, torch.tensor(number)), g)
    torch.testing.assert_close(scaled, number * group.apply(factors, g), rtol=1e-6, atol=1e-6)


# -- pull-back ---------------------------------------------------------------------------------------------------------


def gradients_of(function, factors):
    leaves = {name: factor.clone().requires_grad_() for name, factor in factors.items()}
    value = function(leaves)
    return dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True))


@pytest.mark.parametrize("kind", KINDS)
@given(k=st.integers(1, 3), m=sides, n=sides, seed=seeds)
def test_pull_back_is_the_gradient(kind, k, m, n, seed):
    """Of `<r, U g>`, by autograd through `apply` and through the dense matrices."""
    group = group_of(kind, k, m, n)
    factors, g, r = random_factors(group, seed), random_packed(group, seed), random_packed(group, seed + 3)
    applied, pull = group.trace(factors, g)
    assert applied.equal(group.apply(factors, g))
    pulled = pull(r)
    assert {name: part.shape for name, part in pulled.items()} == {name: f.shape for name, f in factors.items()}

    def through_apply(leaves):
        return (r * group.apply(leaves, g)).sum()

    def through_matrices(leaves):
        rows = zip(flat_blocks(group, r), dense_blocks(group, leaves), flat_blocks(group, g), strict=True)
        return sum(a @ matrix @ b for a, matrix, b in rows)

    for function in (through_apply, through_matrices):
        for name, expected in gradients_of(function, factors).items():
            torch.testing.assert_close(pulled[name], expected, rtol=1e-11, atol=1e-11)


# -- clipping ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0.3, 2.0, 1e6])
@pytest.mark.parametrize("kind", STACKED)
def test_clip_bounds_every_factor_of_every_block(kind, limit):
    group = group_of(kind, k=3)
    gradients = {
        name: factor * torch.tensor([0.01, 1.0, 9.0]).reshape(3, *[1] * (factor.ndim - 1))
        for name, factor in random_factors(group).items()
    }
    clipped = dict(group.named(group.clipped(gradients, limit)))
    for name, gradient in group.named(gradients):
        norm = float(gradient.norm())
        torch.testing.assert_close(clipped[name], gradient * min(1.0, limit / norm), rtol=1e-12, atol=0)


@pytest.mark.parametrize("limit", [0.3, 2.0, 1e6])
def test_clip_of_a_diagonal_bounds_weight_and_bias_together(limit):
    group = group_of("diagonal")
    gradients = {"diagonal": 4 * random_packed(group)}
    pieces = dict(zip((b.name for b in group.blocks), flat_blocks(group, gradients["diagonal"]), strict=True))
    clipped = dict(zip(pieces, flat_blocks(group, group.clipped(gradients, limit)["diagonal"]), strict=True))
    for layer in (["0.weight", "0.bias"], ["1.weight", "1.bias"], ["scale"]):
        norm = float(torch.cat([pieces[name] for name in layer]).norm())
        for name in layer:
            torch.testing.assert_close(clipped[name], pieces[name] * min(1.0, limit / norm), rtol=1e-12, atol=0)


def test_clip_of_a_scalar_bounds_every_layer():
    group = group_of("scalar")
    gradient = torch.tensor([-7.0, 0.2, 6.0], dtype=torch.float64)
    clipped = group.clipped({"scalar": gradient}, 5.0)["scalar"]
    assert clipped.tolist() == pytest.approx([-5.0, 0.2, 5.0], rel=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_clip_leaves_a_zero_gradient_alone(kind):
    group = group_of(kind)
    gradients = {name: torch.zeros_like(factor) for name, factor in group.identity(torch.float64, CPU).items()}
    for part in group.clipped(gradients, 5.0).values():
        assert part.count_nonzero() == 0


# -- bounds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@given(
    seed=seeds,
    spread=st.floats(0.01, 10),
    bounds=st.tuples(st.floats(0.01, 1.0), st.floats(1.0, 100.0)),
    m=sides,
    n=sides,
)
def test_bounds_hold_for_the_dense_spectrum(kind, seed, spread, bounds, m, n):
    group = group_of(kind, m=m, n=n)
    factors = group.constrain(random_factors(group, seed, spread), bounds)
    for matrix in dense_blocks(group, factors):
        torch.testing.assert_close(matrix, matrix.mT, rtol=1e-9, atol=1e-9)
        spectrum = torch.linalg.eigvalsh(matrix)
        assert spectrum.min() >= bounds[0] * (1 - 1e-9)
        assert spectrum.max() <= bounds[1] * (1 + 1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_bounds_leave_what_is_inside(kind):
    group = group_of(kind)
    identity = group.identity(torch.float64, CPU)
    for name, factor in group.constrain(identity, (0.5, 2.0)).items():
        torch.testing.assert_close(factor, identity[name], rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", STACKED)
def test_without_bounds_matrix_factors_are_free(kind):
    group = group_of(kind)
    factors = random_factors(group, spread=3.0)
    assert all(factor.equal(factors[name]) for name, factor in group.constrain(factors, None).items())


@pytest.mark.parametrize("kind", FLAT)
def test_without_bounds_diagonal_and_scalar_have_a_floor(kind):
    group = group_of(kind)
    (name, factor), *_ = random_factors(group, spread=3.0).items()
    assert (factor < 0).any()
    assert group.constrain({name: factor}, None)[name].equal(factor.clamp_min(1e-8))


@pytest.mark.parametrize("kind", [*POSITIVE, "dense"])
@given(seed=seeds, spread=st.floats(0.01, 10), m=sides, n=sides)
def test_symmetric_and_positive_by_construction(kind, seed, spread, m, n):
    group = group_of(kind, m=m, n=n)
    for matrix in dense_blocks(group, random_factors(group, seed, spread)):
        torch.testing.assert_close(matrix, matrix.mT, rtol=1e-10, atol=1e-10)
        if kind in POSITIVE:
            spectrum = torch.linalg.eigvalsh(matrix)
            assert spectrum.min() >= -1e-12 * spectrum.abs().max()


# -- identity, layout, names, storage ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_identity(kind):
    group = group_of(kind)
    factors, g = group.identity(torch.float64, CPU), random_packed(group_of(kind))
    assert {name: tuple(factor.shape) for name, factor in factors.items()} == group.shapes()
    assert group.apply(factors, g).equal(g)
    for matrix in dense_blocks(group, factors):
        assert matrix.equal(torch.eye(len(matrix), dtype=torch.float64))


@pytest.mark.parametrize("kind", KINDS)
@given(k=st.integers(1, 4), m=sides, n=sides)
def test_pack_and_unpack(kind, k, m, n):
    group = group_of(kind, k, m, n)
    pieces = [torch.randn(b.native) for b in group.blocks]
    unpacked = group.unpack(group.pack(pieces))
    assert all(a.equal(b) for a, b in zip(unpacked, pieces, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_named_factors_are_views_that_cover_everything(kind):
    group = group_of(kind)
    factors = random_factors(group)
    named = dict(group.named(factors))
    assert sum(view.numel() for view in named.values()) == group.stored()
    for view in named.values():
        view.zero_()
    assert all(factor.count_nonzero() == 0 for factor in factors.values())


STORED = {
    "kfac": lambda m, n: m * m + n * n,
    "kfac-psd": lambda m, n: m * m + n * n,
    "e-kfac": lambda m, n: m * m + n * n + m * n,
    "e-kfac-psd": lambda m, n: m * m + n * n + m * n,
    "e-kfac-one-sided": lambda m, n: min(m, n) ** 2 + m * n,
    "e-kfac-channels": lambda m, n: m * m + n * n + m * n * prod(KERNEL),
    "diag-kfac": lambda m, n: m + n,
    "dense": lambda m, n: (m * n) ** 2,
}


@pytest.mark.parametrize("kind", KINDS)
@given(k=st.integers(1, 3), m=sides, n=sides)
def test_stored_counts_the_scalars(kind, k, m, n):
    group = group_of(kind, k, m, n)
    assert group.stored() == sum(factor.numel() for factor in group.identity(torch.float64, CPU).values())
    flat = {"diagonal": k * (m * n + m) + n, "scalar": k + 1}
    assert group.stored() == (k * STORED[kind](m, n) if kind in STORED else flat[kind])


@pytest.mark.parametrize("kind", STACKED)
def test_a_stack_equals_its_members_one_by_one(kind):
    stack = group_of(kind, k=3)
    factors, g = random_factors(stack), random_packed(stack)
    applied = stack.apply(factors, g)
    for i in range(3):
        alone = STRUCTURES[kind]([stack.blocks[i]])
        own = {name: factor[i : i + 1] for name, factor in factors.items()}
        assert relative_error(alone.apply(own, g[i : i + 1])[0], applied[i]) < 1e-13


def test_flat_layouts_gather_a_layer_that_comes_in_pieces():
    """Weights first, biases last, as a caller may order them: still one layer, one clip."""
    names = [("a.weight", "a", (2, 2)), ("b.weight", "b", (1, 3)), ("a.bias", "a", (2,)), ("b.bias", "b", (1,))]
    group = STRUCTURES["diagonal"]([block(*row) for row in names])
    assert [b.name for b in group.blocks] == ["a.weight", "a.bias", "b.weight", "b.bias"]
    assert group.layer_sizes == [6, 4]


@pytest.mark.parametrize("sizes", [(ROW, 2 * ROW), (5, ROW, 7, 3 * ROW), (1, 2)], ids=str)
def test_layers_of_whole_rows_and_others(sizes):
    """Those that fill rows come first and share one kernel; the numbers are those of scaling layer by layer."""
    group = STRUCTURES["diagonal"]([block(f"{i}.weight", str(i), (size,)) for i, size in enumerate(sizes)])
    assert [b.size % ROW > 0 for b in group.blocks] == sorted(size % ROW > 0 for size in sizes)
    flat, numbers = random_packed(group), torch.randn(len(sizes), dtype=torch.float64)
    parts = flat.split(group.layer_sizes)
    expected = [part * number for part, number in zip(parts, numbers, strict=True)]
    assert group.scale_layers(flat, numbers).equal(torch.cat(expected))
    sums = torch.stack([part.sum() for part in parts])
    torch.testing.assert_close(group.sum_layers(flat), sums, rtol=1e-13, atol=1e-13)


def test_sums_of_layers_do_not_lose_small_terms():
    """A layer of a network has millions of entries; float32 alone would stop counting ones at 2^24."""
    group = STRUCTURES["scalar"]([block("0.weight", "0", (300_000, ROW))])
    flat = torch.full((300_000 * ROW,), 1.0)
    flat[0] = 2.0**24
    assert group.sum_layers(flat).item() == torch.tensor(2.0**24 + 300_000 * ROW - 1).item()


def test_a_dense_vector_is_a_full_block():
    group = STRUCTURES["dense"]([block("0.bias", "0", (3,)), block("1.bias", "1", (3,))])
    factors, g = random_factors(group), torch.randn(2, 3, dtype=torch.float64)
    for actual, matrix, piece in zip(group.apply(factors, g), dense_blocks(group, factors), g, strict=True):
        assert relative_error(actual, matrix @ piece) < 1e-12
    check = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
    r = torch.randn_like(g)
    check(
        group.trace(factors, g)[1](r)["dense"],
        gradients_of(lambda leaves: (r * group.apply(leaves, g)).sum(), factors)["dense"],
    )


# -- defaults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("m", "n"), [(3, 4), (4, 3)])
def test_hand_written_methods_equal_the_defaults(kind, m, n):
    group = group_of(kind, m=m, n=n)
    factors, g, r = random_factors(group), random_packed(group), random_packed(group, 3)
    for actual, default in zip(dense_blocks(group, factors), applied_to_basis(group, factors), strict=True):
        assert relative_error(actual, default) < 1e-12
    (applied, pull), (default_applied, default_pull) = group.trace(factors, g), Structure.trace(group, factors, g)
    assert applied.equal(default_applied)
    slopes, expected = pull(r), default_pull(r)
    assert list(slopes) == list(expected)
    for name, slope in slopes.items():
        assert relative_error(slope, expected[name]) < 1e-12
    again = default_pull(r)  # may be called more than once
    assert all(again[name].equal(slope) for name, slope in expected.items())


# -- convolutions ------------------------------------------------------------------------------------------------------


def test_channels_of_a_plain_matrix_are_e_kfac():
    blocks = [block("0.weight", "0", (3, 4)), block("1.weight", "1", (3, 4))]
    plain, channels = STRUCTURES["e-kfac"](blocks), STRUCTURES["e-kfac-channels"](blocks)
    factors, g, r = random_factors(plain), random_packed(plain), random_packed(plain, 3)
    assert channels.shapes() == plain.shapes()
    assert channels.apply(factors, g).equal(plain.apply(factors, g))
    slopes = plain.trace(factors, g)[1](r)
    assert all(slope.equal(slopes[name]) for name, slope in channels.trace(factors, g)[1](r).items())


def test_channels_are_e_kfac_whose_basis_is_the_same_at_every_position():
    group = group_of("e-kfac-channels")
    factors, pieces = random_factors(group), group.unpack(random_packed(group))
    wide = torch.stack([torch.kron(q, torch.eye(prod(KERNEL), dtype=q.dtype)) for q in factors["in"]])
    plain = STRUCTURES["e-kfac"](group.blocks)
    same = group.reordered(factors, to_memory=False) | {"in": wide}
    expected = plain.apply_each(same, pieces)
    for actual, Ug in zip(group.apply_each(factors, pieces), expected, strict=True):
        assert relative_error(actual, Ug) < 1e-12

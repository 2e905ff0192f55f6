"""Probes and norms against their formulas in numpy, in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import llqr
from llqr.probes import Point
from llqr.probes.norms import NORMS, divisors

SHAPES = [(3, 2), (3,), (2, 3), (2,), ()]
LAYERS = [0, 0, 1, 1, 2]
IS_BIAS = [False, True, False, True, False]
NAMES = ["0.weight", "0.bias", "1.weight", "1.bias", "scale"]


def tensors(seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def point(seed=0, rho=None, grads=None, dtype=torch.float64):
    grads = tensors(seed + 100) if grads is None else grads
    weights = [torch.nn.Parameter(w.to(dtype)) for w in tensors(seed)]
    radii = {weight: own for weight, own in zip(weights, rho or [], strict=False) if own is not None}
    return Point(weights, [g.to(dtype) for g in grads], dict(zip(weights, NAMES, strict=True)), radii)


def same(v):
    return v


def positive_diagonal(v):
    """A substitute for `U`."""
    return [(1.5 + torch.arange(part.numel(), dtype=part.dtype).reshape(part.shape).sin()) * part for part in v]


def numbers(parts):
    return [np.asarray(part.detach()) for part in parts]


def norm_of(norm, v, d):
    """One divisor per parameter, by definition."""
    squares = [(a * b).sum() for a, b in zip(v if norm.endswith("metric") else d, d, strict=True)]
    if not norm.startswith("layer-"):
        return [np.sqrt(sum(squares) + 1e-12)] * len(squares)
    sums = [sum(s for s, own in zip(squares, LAYERS, strict=True) if own == layer) for layer in range(3)]
    return [np.sqrt(sums[layer] + 1e-12) * np.sqrt(3) for layer in LAYERS]


def each(over):
    """A number for all is that of each parameter."""
    return [over] * len(SHAPES) if isinstance(over, torch.Tensor) else over


def check(displacement, expected):
    for actual, wanted in zip(numbers(displacement), expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("transport", [same, positive_diagonal])
@pytest.mark.parametrize("norm", NORMS)
def test_sam(norm, transport):
    at = point()
    v, d = numbers(at.grads), numbers(transport(at.grads))
    expected = [0.3 * part / over for part, over in zip(d, norm_of(norm, v, d), strict=True)]
    check(llqr.SAMProbe(0.3, norm=norm).displacement(at, transport, 0), expected)


@pytest.mark.parametrize("transport", [same, positive_diagonal])
@pytest.mark.parametrize("norm", NORMS)
def test_asam(norm, transport):
    at = point()
    v = numbers(at.grads)
    scale = [
        np.ones_like(w) if bias else np.abs(w) + 0.02 for w, bias in zip(numbers(at.parameters), IS_BIAS, strict=True)
    ]
    inner = transport([torch.from_numpy(np.asarray(t * g)) for t, g in zip(scale, v, strict=True)])
    d = [t * part for t, part in zip(scale, numbers(inner), strict=True)]
    expected = [0.3 * part / over for part, over in zip(d, norm_of(norm, v, d), strict=True)]
    check(llqr.ASAMProbe(0.3, eta=0.02, norm=norm).displacement(at, transport, 0), expected)


def test_layers_and_biases_are_told_by_names():
    at = point()
    assert at.layers == LAYERS
    assert at.is_bias == IS_BIAS
    nameless = Point(at.parameters, at.grads)
    assert nameless.layers == [0, 1, 2, 3, 4]
    assert nameless.is_bias == [False, True, False, True, True]


def test_asam_without_a_metric_is_its_papers_formula():
    at = point()
    v, w = numbers(at.grads), numbers(at.parameters)
    scale = [np.ones_like(x) if bias else np.abs(x) + 0.01 for x, bias in zip(w, IS_BIAS, strict=True)]
    length = np.sqrt(sum(((t * g) ** 2).sum() for t, g in zip(scale, v, strict=True)) + 1e-12)
    check(
        llqr.ASAMProbe(0.3).displacement(at, same, 0), [0.3 * t**2 * g / length for t, g in zip(scale, v, strict=True)]
    )


@pytest.mark.parametrize("transport", [same, positive_diagonal])
@pytest.mark.parametrize("norm", NORMS)
def test_fisher_sam(norm, transport):
    at = point()
    v = numbers(at.grads)
    scale = [1 / np.sqrt(g**2 + 0.2) for g in v]
    inner = transport([torch.from_numpy(np.asarray(t * g)) for t, g in zip(scale, v, strict=True)])
    d = [t * part for t, part in zip(scale, numbers(inner), strict=True)]
    expected = [0.3 * part / over for part, over in zip(d, norm_of(norm, v, d), strict=True)]
    check(llqr.FisherSAMProbe(0.3, eta=0.2, norm=norm).displacement(at, transport, 0), expected)


def test_fisher_sam_without_a_metric_is_its_papers_formula():
    at = point()
    v = numbers(at.grads)
    inverse = [1 / (g**2 + 0.1) for g in v]
    length = np.sqrt(sum((f * g * g).sum() for f, g in zip(inverse, v, strict=True)) + 1e-12)
    check(
        llqr.FisherSAMProbe(0.3).displacement(at, same, 0),
        [0.3 * f * g / length for f, g in zip(inverse, v, strict=True)],
    )


@pytest.mark.parametrize("transport", [same, positive_diagonal])
def test_friendly_sam_remembers(transport):
    probe = llqr.FriendlySAMProbe(0.3, lam=0.8)
    at = point()
    mean = [np.zeros_like(g) for g in numbers(at.grads)]
    for step in range(4):
        at = Point(at.parameters, tensors(step))
        g = numbers(at.grads)
        v = [a - b for a, b in zip(g, mean, strict=True)]
        d = numbers(transport([torch.from_numpy(np.asarray(part)) for part in v]))
        expected = [0.3 * part / over for part, over in zip(d, norm_of("metric", v, d), strict=True)]
        check(probe.displacement(at, transport, step), expected)
        mean = [0.8 * m + 0.2 * a for m, a in zip(mean, g, strict=True)]


def test_friendly_sam_does_not_touch_the_gradients():
    at = point()
    before = [g.clone() for g in at.grads]
    probe = llqr.FriendlySAMProbe(0.3)
    probe.displacement(at, same, 0)
    probe.displacement(at, same, 1)
    assert all(a.equal(b) for a, b in zip(at.grads, before, strict=True))


@pytest.mark.parametrize("transport", [same, positive_diagonal])
def test_what_a_custom_probe_filters_is_not_written_to(transport):
    """It may belong to something else: a momentum, here."""

    class MomentumProbe(llqr.SAMProbe):
        def filtered(self, point):
            return momenta

    momenta = tensors(7)
    before = [part.clone() for part in momenta]
    eps = MomentumProbe(0.3).displacement(point(), transport, 0)
    assert all(a.equal(b) for a, b in zip(momenta, before, strict=True))
    assert not any(a is b for a, b in zip(eps, momenta, strict=True))


def test_friendly_sams_memory_is_its_state():
    first, second = llqr.FriendlySAMProbe(0.3, lam=0.7), llqr.FriendlySAMProbe(0.3, lam=0.7)
    at = point()
    for step in range(3):
        first.displacement(Point(at.parameters, tensors(step)), same, step)
        before = second.state_dict(at.parameters)
        second.load_state_dict(first.state_dict(at.parameters), at.parameters)
        assert all(mean.equal(before["mean"][i]) for i, mean in second.state_dict(at.parameters)["mean"].items())
        first.settle()
        second.load_state_dict(first.state_dict(at.parameters), at.parameters)
    later = Point(at.parameters, tensors(50))
    expected = first.displacement(later, same, 3)
    assert all(a.equal(b) for a, b in zip(second.displacement(later, same, 3), expected, strict=True))
    with pytest.raises(ValueError, match=r"the F-SAM mean of parameter 0 has shape \(3, 2\), expected \(5,\)"):
        second.load_state_dict(first.state_dict(at.parameters), [torch.zeros(5), *at.parameters[1:]])


def test_a_parameter_that_friendly_sam_sees_only_later():
    """Its mean then starts at 0, whatever those of the others are."""
    probe = llqr.FriendlySAMProbe(0.3, lam=0.8)
    at = point()
    probe.displacement(Point(at.parameters[:2], at.grads[:2]), same, 0)
    both = probe.filtered(at)
    assert both[2].equal(at.grads[2])
    torch.testing.assert_close(both[0], 0.8 * at.grads[0])


# -- radius and schedule -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", NORMS)
@given(seed=st.integers(0, 2**31 - 1), rho=st.floats(1e-3, 10))
def test_the_displacement_has_length_rho(norm, seed, rho):
    """In the norm's own measure; the layerwise forms divide by the root of the number of layers."""
    at = point(seed)
    eps = llqr.SAMProbe(rho, norm=norm).displacement(at, same, 0)
    assert np.sqrt(sum((e**2).sum() for e in numbers(eps))) == pytest.approx(rho, rel=1e-9)


def test_rho_of_the_step_and_of_the_group():
    at = point(rho=[None, 0.5, None, 0.0, None])
    plain = llqr.SAMProbe(1.0).displacement(point(), same, 0)
    scheduled = llqr.SAMProbe(lambda step: 0.1 * step).displacement(at, same, 4)
    check(scheduled, [factor * part for factor, part in zip([0.4, 0.5, 0.4, 0.0, 0.4], numbers(plain), strict=True)])


def test_start_after():
    probe = llqr.SAMProbe(0.1, start_after=3)
    assert [probe.active(step) for step in range(5)] == [False, False, False, True, True]


def test_rho_zero_is_no_displacement():
    assert all(part.count_nonzero() == 0 for part in llqr.SAMProbe(0.0).displacement(point(), same, 0))


@pytest.mark.parametrize("probe", [llqr.SAMProbe, llqr.ASAMProbe, llqr.FisherSAMProbe, llqr.FriendlySAMProbe])
@pytest.mark.parametrize("norm", NORMS)
def test_a_zero_gradient_stays_at_the_centre(probe, norm):
    at = point(grads=[torch.zeros(shape, dtype=torch.float64) for shape in SHAPES])
    for part in probe(0.1, norm=norm).displacement(at, same, 0):
        assert part.count_nonzero() == 0


@pytest.mark.parametrize("norm", ["metric", "layer-metric"])
def test_where_the_metric_is_not_positive_the_probe_stays_at_the_centre(norm):
    def partly_negative(v):
        return [part if i < 2 else -2 * part for i, part in enumerate(v)]

    at = point(grads=[g / 10 if i < 2 else g for i, g in enumerate(tensors(3))])
    eps = llqr.SAMProbe(0.1, norm=norm).displacement(at, partly_negative, 0)
    assert all(part.count_nonzero() == 0 for part in eps[2:])
    assert all((part.count_nonzero() == 0) == (norm == "metric") for part in eps[:2])


def test_a_custom_norm():
    def largest(v, d):
        top = torch.stack([part.abs().max() for part in d]).max()
        return [top] * len(d)

    eps = llqr.SAMProbe(0.3, norm=largest).displacement(point(), positive_diagonal, 0)
    assert max(np.abs(part).max() for part in numbers(eps)) == pytest.approx(0.3)


@pytest.mark.parametrize("returned", [None, torch.ones(()), [torch.ones(())], [1.0, 1.0]])
def test_a_custom_norm_that_returns_something_else_is_named(returned):
    with pytest.raises(TypeError, match=r"^norm: expected the function to return a list of \d tensors, one divisor"):
        llqr.SAMProbe(0.1, norm=lambda v, d: returned).displacement(point(), same, step=0)


@pytest.mark.parametrize("value", [None, "much", True])
def test_a_schedule_that_returns_no_number_is_named(value):
    with pytest.raises(ValueError, match=rf"^rho: expected a number in \[0, inf\), got {value!r} at step 7"):
        llqr.SAMProbe(lambda step: value).displacement(point(), same, step=7)


def test_a_norm_for_every_row_of_one_parameter():
    """Many trajectories in one tensor, or only one."""
    for rows in (1, 3):
        g = torch.randn(rows, 2, dtype=torch.float64)
        at = Point([torch.zeros_like(g)], [g])
        probe = llqr.SAMProbe(0.3, norm=lambda v, d: [part.norm(dim=-1, keepdim=True) for part in d])
        (eps,) = probe.displacement(at, lambda v: v, 0)
        torch.testing.assert_close(eps.norm(dim=-1), torch.full((rows,), 0.3, dtype=torch.float64))


@pytest.mark.parametrize("norm", NORMS)
def test_any_memory_order(norm):
    """Channels last, transposed, every other entry, empty, an expanded number; and another order in `d`."""
    one, images = torch.randn(6, 4, dtype=torch.float64), torch.randn(2, 3, 4, 5, dtype=torch.float64)
    v = [images.to(memory_format=torch.channels_last), one.t(), one[:, ::2], one[:0], one[0, 0].expand(3)]
    d = [part * (2 + part.cos()) for part in v]
    d[0] = d[0].contiguous()
    d[1] = d[1].t().contiguous().t()
    for actual, wanted in zip(each(divisors(norm, v, d, point())), norm_of(norm, numbers(v), numbers(d)), strict=True):
        np.testing.assert_allclose(float(actual), float(wanted), rtol=1e-12)


def test_mixed_dtypes_keep_their_own_precision():
    """The divisor is not rounded to the first parameter's dtype."""
    grads = tensors(1)
    at = point(grads=grads)
    mixed = Point(at.parameters, [grads[0].bfloat16(), *(g.float() for g in grads[1:4]), grads[4]])
    eps = llqr.SAMProbe(0.3).displacement(mixed, same, 0)
    assert [part.dtype for part in eps] == [g.dtype for g in mixed.grads]
    length = np.sqrt(sum((numbers([g.double()])[0] ** 2).sum() for g in mixed.grads) + 1e-12)
    for part, g in zip(eps[1:], grads[1:], strict=True):
        np.testing.assert_allclose(numbers([part.double()])[0], 0.3 * numbers([g])[0] / length, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_are_summed_in_float32(dtype):
    grads = [torch.full((4096,), 1.0).to(dtype)]
    for norm in NORMS:
        for transported in (grads, [2 * grads[0]]):
            over = each(divisors(norm, grads, transported, Point(grads, grads)))[0]
            assert over.dtype == torch.float32
    over = divisors("euclidean", grads, grads, Point(grads, grads))
    assert float(over) == pytest.approx(64.0, rel=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: llqr.SAMProbe(-0.1), "rho: expected a number in"),
        (lambda: llqr.SAMProbe("big"), "rho: expected a number in"),
        (lambda: llqr.SAMProbe(0.1, norm="l2"), "norm: unknown 'l2'; choose one of metric, euclidean, layer-metric"),
        (lambda: llqr.SAMProbe(0.1, start_after=-1), "start_after: expected"),
        (lambda: llqr.ASAMProbe(0.1, eta=-1), "eta: expected"),
        (lambda: llqr.FisherSAMProbe(0.1, eta=0), "eta: expected"),
        (lambda: llqr.FriendlySAMProbe(0.1, lam=1.5), "lam: expected"),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_mean_of_f_sam_is_kept_in_the_dtype_of_the_gradients():
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    probe = llqr.FriendlySAMProbe(0.3)
    mean = torch.tensor([1.001, 2.0, 3.0])
    probe.load_state_dict({"mean": {0: mean}}, [weight])
    assert probe.state_dict([weight])["mean"][0].equal(mean)


@pytest.mark.parametrize("probe", [llqr.SAMProbe, llqr.FriendlySAMProbe])
def test_with_a_metric_the_default_displacement_has_length_rho_in_the_metric(probe):
    """`eps = rho U g / sqrt(g.Ug)`: `eps.U^-1 eps = rho^2`, so that the probe shrinks with `U`."""
    eps = probe(0.3).displacement(point(), positive_diagonal, 0)
    one = positive_diagonal([torch.ones_like(part) for part in eps])
    square = sum(float((part.square() / u).sum()) for part, u in zip(eps, one, strict=True))
    assert square == pytest.approx(0.3**2, rel=1e-9)


@pytest.mark.parametrize("norm", ["", "layer-"])
def test_without_a_metric_the_metric_norm_is_the_euclidean_one_bit_by_bit(norm):
    for transport in (same, list):  # `list`: a geometry that has learned nothing yet gives a new list
        one, other = (
            llqr.SAMProbe(0.3, norm=f"{norm}{kind}").displacement(point(), transport, 0)
            for kind in ("metric", "euclidean")
        )
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("make", [llqr.SAMProbe, llqr.ASAMProbe, llqr.FisherSAMProbe])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_large_and_small_gradients_in_float16(make, size):
    """`g^2` and `T^2 g` leave the range of float16 where the displacement does not."""
    draw = torch.Generator().manual_seed(0)
    weight, g = 10 * torch.randn(3, 4, generator=draw).half(), (size * torch.randn(3, 4, generator=draw)).half()
    exact, found = (
        make(rho=0.1).displacement(Point([w], [v], names={w: "weight"}), lambda u: u, 0)[0]
        for w, v in ((weight.double(), g.double()), (weight, g))
    )
    assert found.dtype == torch.float16
    assert torch.allclose(found.double(), exact, rtol=2e-3, atol=1e-6)

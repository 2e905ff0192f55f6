"""Properties of the wrapper that hold for any model, any metric and any failure."""

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import llqr
from geometries import flat_geometry
from traps.training import assert_same_bits, closure_of, cross_entropy, weights

SEEDS = st.integers(0, 2**16)
DTYPES = st.sampled_from([torch.float32, torch.float64])
PROBES = st.sampled_from([llqr.SAM, llqr.ASAM, llqr.FisherSAM, llqr.FriendlySAM])
NORMS = st.sampled_from(["metric", "euclidean", "layer-metric", "layer-euclidean"])
BASES = st.sampled_from(
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
        lambda p: torch.optim.AdamW(p, lr=0.01),
        lambda p: torch.optim.RMSprop(p, lr=0.01),
    ]
)
quick = settings(max_examples=60, deadline=None, derandomize=True)


class Boom(Exception):
    pass


@st.composite
def models(draw, orders: int = 6) -> nn.Sequential:
    """Up to four layers of any width and of weights many orders apart, with or without biases, norms and dropout."""
    torch.manual_seed(draw(SEEDS))
    widths = [4, *draw(st.lists(st.integers(2, 6), max_size=3)), 3]
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(widths):
        layers.append(nn.Linear(fan_in, fan_out, bias=draw(st.booleans())))
        if draw(st.booleans()):
            layers.append(draw(st.sampled_from([nn.BatchNorm1d, nn.LayerNorm]))(fan_out))
        if draw(st.booleans()):
            layers.append(draw(st.sampled_from([nn.Tanh(), nn.GELU(), nn.Dropout(0.3)])))
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(10.0 ** draw(st.integers(-orders, orders)))
    return model


def batch_of(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(6, 4, generator=draw).to(dtype), torch.randint(3, (6,), generator=draw)


@quick
@given(models(), PROBES, NORMS, st.floats(0, 1e8), st.integers(0, 5), st.integers(0, 3), st.booleans())
def test_restoration_is_exact_for_random_models_and_random_failures(model, make, norm, rho, failing, place, none):
    """Call number `failing` of the closure raises at one of four places; what was there before the step is there."""
    batch = batch_of()
    opt = make(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rho=rho, norm=norm, model=model)
    calls = []

    def closure():
        calls.append(1)

        def maybe(here: int) -> None:
            if len(calls) == failing and place == here:
                raise Boom

        maybe(0)
        opt.zero_grad(set_to_none=none)
        maybe(1)
        loss = cross_entropy(model(batch[0]), batch[1])
        maybe(2)
        loss.backward()
        maybe(3)
        return loss

    for step in range(2):
        before = weights(model)
        seen: list[dict] = []
        handle = opt.base.register_step_pre_hook(lambda *_, seen=seen: seen.append(weights(model)))
        try:
            opt.step(closure)
        except Boom:
            assert opt.steps == step
            assert not seen
            after = weights(model)
        else:
            after = seen[0]
        handle.remove()
        for name, _ in model.named_parameters():
            assert after[name].equal(before[name])


@quick
@given(models(), DTYPES, PROBES, NORMS, BASES, st.floats(0, 1), st.sampled_from(["identity", "unlearned"]))
def test_the_identity_metric_changes_no_bit(model, dtype, make, norm, base, rho, kind):
    """With the structure "identity" refreshed, or before anything is learned, LLQR+SAM is SAM."""
    model.to(dtype)
    batch = batch_of(dtype)
    start, random = weights(model), torch.get_rng_state()
    ends = []
    for learned in (False, True):
        model.load_state_dict(start)
        torch.set_rng_state(random)
        geometry = None
        if learned:
            geometry = flat_geometry(model, cross_entropy, structure="identity", engine="double-backward", every=1)
            if kind == "unlearned":
                geometry = flat_geometry(model, cross_entropy, structure="kfac")
                geometry._next = 10**9
        opt = make(base(model.parameters()), rho=rho, norm=norm, geometry=geometry, model=model)
        for _ in range(3):
            opt.step(closure_of(opt, model, batch), batch=batch)
        ends.append(weights(model))
    for name, w in ends[0].items():
        assert torch.equal(w.nan_to_num(), ends[1][name].nan_to_num())


@quick
@given(models(orders=2), DTYPES, PROBES, NORMS, BASES)
def test_radius_zero_is_the_base_optimizer_bit_by_bit(model, dtype, make, norm, base):
    model.to(dtype)
    batch = batch_of(dtype)
    start, random = weights(model), torch.get_rng_state()
    plain = base(model.parameters())
    for _ in range(3):
        closure_of(plain, model, batch)()
        plain.step()
    expected = weights(model)
    model.load_state_dict(start)
    torch.set_rng_state(random)
    opt = make(base(model.parameters()), rho=0.0, norm=norm, model=model)
    for _ in range(3):
        opt.step(closure_of(opt, model, batch))
    assert_same_bits(weights(model), expected)


def dense_metric(size: int, seed: int) -> torch.Tensor:
    """A random symmetric positive definite matrix."""
    root = torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return root @ root.T / size + 0.1 * torch.eye(size, dtype=torch.float64)


@quick
@given(SEEDS, st.floats(0.01, 1), st.sampled_from(["metric", "euclidean"]), st.booleans(), st.booleans())
def test_llqr_sam_with_a_given_metric_equals_its_formula(seed, rho, norm, transport, momentum):
    """`theta+ = theta + rho U g / norm`, `theta <- theta - eta (m <- mu m + U g(theta+) + decay theta)`, written out.

    `theta` is one flat vector here and `U` one dense matrix a parameter; the wrapper sees an ordinary model.
    """
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    batch = batch_of(torch.float64)
    lr, mu, decay = 0.1, 0.9 if momentum else 0.0, 0.05
    blocks = [dense_metric(p.numel(), seed + i) for i, p in enumerate(model.parameters())]
    u = torch.block_diag(*blocks)
    theta = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    shapes = {name: p.shape for name, p in model.named_parameters()}

    def gradient(flat: torch.Tensor) -> torch.Tensor:
        flat = flat.clone().requires_grad_()
        pieces = flat.split([shape.numel() for shape in shapes.values()])
        named = {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}
        loss = cross_entropy(torch.func.functional_call(model, named, batch[0]), batch[1])
        return torch.autograd.grad(loss, flat)[0]

    velocity = torch.zeros_like(theta)
    for _ in range(3):
        g = gradient(theta)
        size = g @ u @ g if norm == "metric" else (u @ g) @ (u @ g)
        there = gradient(theta + rho * (u @ g) / torch.sqrt(size + 1e-12))
        velocity = mu * velocity + (u @ there if transport else there) + decay * theta
        theta = theta - lr * velocity

    pairs = zip(model.parameters(), blocks, strict=True)
    geometry = llqr.FixedGeometry([(p, lambda g, b=b: (b @ g.flatten()).view_as(g)) for p, b in pairs])
    base = torch.optim.SGD(model.parameters(), lr=lr, momentum=mu, weight_decay=decay)
    opt = llqr.LLQRSAM(base, geometry, rho=rho, norm=norm, transport=transport, model=model)
    for _ in range(3):
        opt.step(closure_of(opt, model, batch))
    ours = nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(ours, theta, rtol=1e-10, atol=1e-12)

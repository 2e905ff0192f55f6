"""Models that are not a fixed function of their weights: they draw random numbers, keep states, write, recompute."""

import copy
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import llqr
from geometries import flat_geometry
from references import DIFFERENCES, flat, relative_error

DOUBLE = torch.float64


def drawn_batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(8, 6, generator=draw, dtype=DOUBLE), torch.randint(3, (8,), generator=draw)


def learned(model: nn.Module, **settings) -> dict[str, Tensor]:
    geometry = flat_geometry(model.double(), F.cross_entropy, **({"steps": 3, "lr": 0.05} | settings))
    assert geometry.refresh(drawn_batch()).accepted
    return geometry.metric.named_factors()


# -- random numbers in eval mode ---------------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Drops out in eval mode too, as a model does that draws its noise in the forward pass."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 9), nn.Linear(9, 3)

    def forward(self, x):
        return self.last(F.dropout(self.first(x).tanh(), 0.5, training=True))


@pytest.mark.parametrize("engine", ["auto", *(name for name in llqr.ENGINES if name != "linearised")])
def test_all_products_use_the_same_random_numbers(engine):
    model, products = Noisy().double(), []
    geometry = flat_geometry(model, F.cross_entropy, engine=engine)
    for exact in (geometry, flat_geometry(model, F.cross_entropy, engine="double-backward")):
        torch.manual_seed(3)
        with exact.quadratic_model(drawn_batch()) as quadratic:
            v = {name: torch.ones_like(part) for name, part in quadratic.gradient.items()}
            products += [quadratic.gradient, quadratic.product(v), quadratic.product(v)]
    mine, theirs = products[:3], products[3:]
    assert flat(mine[1]).equal(flat(mine[2]))
    for own, exact in zip(mine, theirs, strict=True):
        assert relative_error(flat(own), flat(exact)) < (1e-6 if engine in DIFFERENCES else 1e-10)


def test_a_trace_of_random_numbers_is_refused():
    with pytest.raises(RuntimeError, match=r"^engine: 'linearised' .* draws random numbers in eval mode"):
        learned(Noisy(), engine="linearised")


def test_every_refresh_draws_new_random_numbers():
    model = Noisy().double()
    geometry = flat_geometry(model, F.cross_entropy, steps=2)
    losses = set()
    for _ in range(3):
        losses.add(geometry.refresh(drawn_batch()).loss)
        torch.rand(1)  # as a training step does
    assert len(losses) == 3


# -- passes that are not the same with and without gradients -----------------------------------------------------------


class Padded(nn.Module):
    """Where nobody needs gradients, torch's fast path sets what is padded to zero; here that reaches the outputs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 1), nn.Linear(6, 3)

    def forward(self, x):
        sequence, padded = torch.stack([x, x.roll(1, 1), -x], 1), torch.tensor([[False, False, True]])
        return self.head(self.encoder(sequence, src_key_padding_mask=padded.expand(len(x), 3)).mean(1))


def test_both_sides_of_a_product_are_of_the_same_pass():
    model, products = Padded().double(), {}
    for engine in ("finite-differences", "double-backward"):
        geometry = flat_geometry(model, F.cross_entropy, engine=engine)
        exact_attention = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
        with exact_attention, geometry.quadratic_model(drawn_batch()) as quadratic:
            products[engine] = flat(quadratic.product(quadratic.gradient))
    assert relative_error(products["finite-differences"], products["double-backward"]) < 1e-6
    assert torch.backends.mha.get_fastpath_enabled()


# -- what a forward pass writes to ------------------------------------------------------------------------


class Renormed(nn.Module):
    """torch's own: rows of an embedding are shortened in place when they are looked up."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(7, 4, max_norm=0.5), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.table(x[:, 0].abs().long()).tanh())


class InPlace(nn.Module):
    """Prepares its inputs in place, which a training loop does not notice: each batch is used once."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.last(self.first(x.mul_(0.5).add_(1)).tanh())


@pytest.mark.parametrize("kind", [Renormed, InPlace])
def test_a_model_that_writes_to_its_parameters_or_inputs_is_refused(kind):
    with pytest.raises(ValueError, match="model: its forward pass writes to its parameters or inputs"):
        learned(kind())


class Remembering(nn.Module):
    """Keeps what it has computed as an attribute."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x):
        self.seen = self.first(x).tanh()
        return self.last(self.seen)


class RememberingInLists(Remembering):
    """Keeps it in a list, and in a dict in a dict."""

    def __init__(self):
        super().__init__()
        self.states, self.cache = [torch.zeros(5)], {"layers": {0: torch.zeros(5)}}

    def forward(self, x):
        out = super().forward(x + 0.1 * self.states[0].mean().detach())
        self.states[0] = self.cache["layers"][0] = self.seen.detach()
        self.states.append(self.seen)
        return out


def spectrally_normed():
    """With torch's older function, which keeps the weight as an attribute that a hook computes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 5)), nn.Tanh(), nn.Linear(5, 3))


@pytest.mark.parametrize("engine", ["auto", "double-backward", "finite-differences"])
@pytest.mark.parametrize("make", [Remembering, spectrally_normed])
def test_a_refresh_restores_attributes(make, engine):
    model = make().double()
    attributes = [dict(module.__dict__) for module in model.modules()]
    geometry = flat_geometry(model, F.cross_entropy, engine=engine)
    assert geometry.refresh(drawn_batch()).accepted
    for module, before in zip(model.modules(), attributes, strict=True):
        assert module.__dict__.keys() == before.keys()
        assert all(module.__dict__[name] is value for name, value in before.items())
    copy.deepcopy(model)


@pytest.mark.parametrize("engine", ["auto", "double-backward", "finite-differences", "linearised"])
def test_a_refresh_restores_lists_and_dicts(engine):
    """Forward mode would leave tensors there that can be neither saved nor copied."""
    model = RememberingInLists().double()
    state, layer = model.states[0], model.cache["layers"][0]
    assert flat_geometry(model, F.cross_entropy, engine=engine).refresh(drawn_batch()).accepted
    assert [one is state for one in model.states] == [True]
    assert model.cache["layers"][0] is layer
    copy.deepcopy(model)


class ReadOnly(OrderedDict):
    """As diffusers' configurations, and the outputs of transformers, refuse `update`."""

    def update(self, *_):
        raise TypeError("read only")


def test_a_model_may_hold_a_dict_that_cannot_be_updated():
    model = nn.Linear(6, 3).double()
    model.config = held = ReadOnly(depth=1)
    assert flat_geometry(model, F.cross_entropy).refresh(drawn_batch()).accepted
    assert model.config is held
    assert held == {"depth": 1}


class Merging(nn.Linear):
    """As in loralib: `eval` adds what is trained to the frozen weight, and `train` takes it away again."""

    def __init__(self):
        super().__init__(6, 3)
        torch.manual_seed(0)
        self.weight.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.randn(3, 2))
        self.merged = False

    def train(self, mode=True):
        if mode == self.merged:
            self.weight.data += (-1 if mode else 1) * self.b @ self.a
            self.merged = not mode
        return super().train(mode)

    def forward(self, x):
        return super().forward(x) if self.merged else super().forward(x) + x @ self.a.T @ self.b.T


def test_a_refresh_does_not_merge_what_is_trained():
    model = Merging().double()
    before = model.weight.detach().clone()
    factors = learned(model)
    assert model.weight.equal(before)
    assert (model.merged, model.training) == (False, True)
    assert not factors["a"].equal(torch.ones_like(factors["a"]))


# -- checkpointed activations, which are computed again in the backward pass -------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, recompute: bool = True):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh())
        self.head = nn.Linear(5, 3)
        self.recompute = recompute

    def forward(self, x):
        return self.head(checkpoint(self.body, x, use_reentrant=False) if self.recompute else self.body(x))


@pytest.mark.parametrize("engine", ["auto", "forward", "double-backward", *DIFFERENCES])
def test_checkpointed_models_give_the_same_metric(engine):
    factors = learned(Checkpointed(), engine=engine)
    expected = learned(Checkpointed(recompute=False), engine=engine)
    assert all(factor.equal(expected[name]) for name, factor in factors.items())


def test_newton_by_differences_refuses_a_checkpointed_model():
    with pytest.raises(RuntimeError, match=r"engine: .*torch\.utils\.checkpoint.*; choose 'double-backward'"):
        learned(Checkpointed(), divergence="newton", engine="finite-differences")

"""Models that are not a fixed function of their weights: they draw random numbers, or write to their parameters."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import llqr
from geometries import flat_geometry
from references import DIFFERENCES, ONE_PROCESS, flat, relative_error

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


@pytest.mark.parametrize("engine", ["auto", *(name for name in ONE_PROCESS if name != "linearised")])
def test_every_product_is_of_one_and_the_same_draw(engine):
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


def test_successive_refreshes_draw_anew():
    model = Noisy().double()
    geometry = flat_geometry(model, F.cross_entropy, steps=2)
    losses = set()
    for _ in range(3):
        losses.add(geometry.refresh(drawn_batch()).loss)
        torch.rand(1)  # as a training step does
    assert len(losses) == 3


# -- parameters that the forward pass writes to ------------------------------------------------------------------------


class Renormed(nn.Module):
    """torch's own: rows of an embedding are shortened in place when they are looked up."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(7, 4, max_norm=0.5), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.table(x[:, 0].abs().long()).tanh())


class Clamped(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x):
        with torch.no_grad():
            torch._foreach_clamp_max_([self.first.weight, self.first.bias], 0.1)
        return self.last(self.first(x).tanh())


class Follower(nn.Module):
    """A frozen encoder that follows another one whenever the model is called, as in MoCo."""

    def __init__(self, by_data: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.leader, self.follower, self.head = nn.Linear(6, 5), nn.Linear(6, 5), nn.Linear(5, 3)
        self.follower.requires_grad_(False)
        self.by_data = by_data

    def forward(self, x):
        with torch.no_grad():
            for ahead, behind in zip(self.leader.parameters(), self.follower.parameters(), strict=True):
                if self.by_data:
                    behind.data = 0.9 * behind.data + 0.1 * ahead.data
                else:
                    behind.mul_(0.9).add_(ahead, alpha=0.1)
        return self.head(self.leader(x).tanh() * self.follower(x).tanh())


RESTLESS = {
    "embedding": Renormed,
    "clamped": Clamped,
    "in-place": Follower,
    "by-data": lambda: Follower(by_data=True),
}


@pytest.mark.parametrize("engine", ["auto", "double-backward", "finite-differences"])
@pytest.mark.parametrize("kind", RESTLESS)
@pytest.mark.parametrize("settings", [{}, {"micro_batch": 3}, {"spread": True}], ids=["whole", "pieces", "spread"])
def test_a_refresh_leaves_them_as_they_were(kind, engine, settings):
    model = RESTLESS[kind]().double()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    places = [p.data_ptr() for p in model.parameters()]
    learned(model, engine=engine, **settings)
    learned(model, engine=engine, **settings)
    assert all(p.equal(before[name]) for name, p in model.named_parameters())
    assert [p.data_ptr() for p in model.parameters()] == places


@pytest.mark.parametrize("kind", RESTLESS)
def test_every_product_starts_from_the_same_weights(kind):
    geometry = flat_geometry(RESTLESS[kind]().double(), F.cross_entropy, engine="finite-differences")
    with geometry.quadratic_model(drawn_batch()) as quadratic:
        first, second = (flat(quadratic.product(quadratic.gradient)) for _ in range(2))
    assert first.equal(second)


@pytest.mark.parametrize("engine", ["forward", "linearised"])
def test_forward_mode_is_refused_where_torch_would_crash(engine):
    with pytest.raises(RuntimeError, match=r"assigns to `\.data` of follower\.bias, .*'double-backward'"):
        learned(Follower(by_data=True), engine=engine)


def test_what_is_compiled_in_one_piece_does_not_stop_the_search():
    """torch does not compile where every operation is looked at, and would not try again later."""
    model, (x, y) = Clamped().double(), drawn_batch()
    compiled = torch.compile(lambda x: x.tanh() + 1, backend="eager", fullgraph=True)
    before = model.first.weight.detach().clone()
    geometry = flat_geometry(model, F.cross_entropy, steps=2, forward=lambda module, x: module(compiled(x)))
    assert geometry.refresh((x, y)).accepted
    assert model.first.weight.equal(before)
    assert compiled(x).equal(x.tanh() + 1)


# -- what else a forward pass may write to -----------------------------------------------------------------------------


class InPlace(nn.Module):
    """Prepares its inputs in place, which a training loop does not notice: each batch is used once."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.last(self.first(x.mul_(0.5).add_(1)).tanh())


@pytest.mark.parametrize("engine", ["auto", "forward", "double-backward", "finite-differences"])
@pytest.mark.parametrize("settings", [{}, {"micro_batch": 3}], ids=["whole", "pieces"])
def test_the_inputs_stay_as_they_were(engine, settings):
    batch, expected = drawn_batch(), drawn_batch()
    geometry = flat_geometry(InPlace().double(), F.cross_entropy, engine=engine, steps=3, **settings)
    report = geometry.refresh(batch)
    assert batch[0].equal(expected[0])
    assert report.loss == pytest.approx(F.cross_entropy(geometry.model(expected[0]), expected[1]).item(), rel=1e-12)
    assert report.objective_after < report.objective_before


class Stateful(nn.Module):
    """Goes on from the state it was left in, kept as an attribute, and remembers what it has seen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)
        self.state = None

    def forward(self, x):
        hidden = self.first(x).tanh()
        hidden = hidden if self.state is None else hidden + self.state
        self.state, self.seen = hidden.detach().mean(0), hidden
        return self.last(hidden)


def spectrally_normed():
    """With torch's older function, which keeps the weight as an attribute that a hook computes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 5)), nn.Tanh(), nn.Linear(5, 3))


@pytest.mark.parametrize("engine", ["auto", *ONE_PROCESS])
@pytest.mark.parametrize("make", [Stateful, spectrally_normed])
def test_attributes_stay_as_they_were(make, engine):
    model = make().double()
    attributes = [dict(module.__dict__) for module in model.modules()]
    geometry = flat_geometry(model, F.cross_entropy, engine=engine)
    with geometry.quadratic_model(drawn_batch()) as quadratic:
        first, second = (flat(quadratic.product(quadratic.gradient)) for _ in range(2))
    assert first.equal(second)
    assert geometry.refresh(drawn_batch()).accepted
    for module, before in zip(model.modules(), attributes, strict=True):
        assert module.__dict__.keys() == before.keys()
        assert all(module.__dict__[name] is value for name, value in before.items())
    copy.deepcopy(model)


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


# -- what the loss writes to -------------------------------------------------------------------------------------------


class Centred(nn.Module):
    """As in DINO: the loss subtracts a centre from the targets, and moves it whenever it is called."""

    def __init__(self, *, in_place: bool):
        super().__init__()
        self.in_place = in_place
        self.register_buffer("centre", torch.zeros(3, dtype=DOUBLE))

    def forward(self, outputs, targets):
        return self.of(outputs, torch.eye(3, dtype=DOUBLE)[targets])

    def of(self, outputs, targets):
        loss = -((targets - self.centre).softmax(-1) * outputs.log_softmax(-1)).sum(-1).mean()
        moved = 0.9 * self.centre + targets.mean(0)
        if self.in_place:
            self.centre.copy_(moved)
        else:
            self.centre = moved
        return loss


FORMS = {
    "itself": lambda centred: centred,
    "method": lambda centred: centred.forward,
    "closure": lambda centred: lambda outputs, targets: centred(outputs, targets),
}


@pytest.mark.parametrize(("engine", "form"), [*(("auto", form) for form in FORMS), ("linearised", "closure")])
@pytest.mark.parametrize("in_place", [True, False])
def test_the_state_of_a_loss_stays_as_it_was(engine, form, in_place):
    torch.manual_seed(0)
    model, loss_fn = nn.Linear(6, 3).double(), Centred(in_place=in_place)
    geometry = flat_geometry(model, FORMS[form](loss_fn), engine=engine, steps=2)
    x, y = drawn_batch()
    for centre in (torch.zeros(3, dtype=DOUBLE), torch.tensor([3.0, 0.0, 0.0], dtype=DOUBLE)):
        loss_fn.centre = given = centre.clone()
        report = geometry.refresh((x, y))
        assert loss_fn.centre is given
        assert given.equal(centre)
        assert report.loss == pytest.approx(loss_fn(model(x), y).item(), rel=1e-12)  # at the centre it has now


@pytest.mark.parametrize("engine", ["auto", "one-sided-differences"])  # which reads the outputs again
def test_a_loss_may_write_to_the_outputs(engine):
    def sharpened(outputs, targets):
        return F.cross_entropy(outputs.mul_(2), targets)

    torch.manual_seed(0)
    model = nn.Linear(6, 3).double()
    settings = {"engine": engine, "steps": 3, "lr": 0.05}
    written = flat_geometry(model, sharpened, **settings)
    expected = flat_geometry(model, lambda outputs, targets: F.cross_entropy(2 * outputs, targets), **settings)
    for geometry in (written, expected):
        geometry.refresh(drawn_batch())
    for name, factor in expected.metric.named_factors().items():
        assert written.metric.named_factors()[name].equal(factor)


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
def test_activations_may_be_computed_again(engine):
    factors = learned(Checkpointed(), engine=engine)
    expected = learned(Checkpointed(recompute=False), engine=engine)
    assert all(factor.equal(expected[name]) for name, factor in factors.items())


@pytest.mark.parametrize("engine", ["auto", "double-backward", "forward"])
def test_but_not_at_weights_that_the_model_does_not_have(engine):
    """A spread refresh learns at copies, and the second pass would compute activations with the model's weights."""
    with pytest.raises(RuntimeError, match=r"^spread: .*torch\.utils\.checkpoint.*; leave spread out"):
        learned(Checkpointed(), engine=engine, spread=True)
    with pytest.raises(RuntimeError, match=r"engine: .*torch\.utils\.checkpoint.*; choose 'double-backward'"):
        learned(Checkpointed(), divergence="newton", engine="finite-differences")


# -- second derivatives that torch gets wrong --------------------------------------------------------------------------


def test_auto_does_not_take_second_derivatives_that_are_not_symmetric():
    """The double backward pass of torch's weight normalisation is wrong."""
    torch.manual_seed(0)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 5))
    model = nn.Sequential(normed, nn.Tanh(), nn.Linear(5, 3)).double()
    geometry = flat_geometry(model, F.cross_entropy, divergence="newton")
    exact = flat_geometry(model, F.cross_entropy, divergence="newton", engine="finite-differences")
    with (
        pytest.warns(llqr.RefreshWarning, match="double-backward: its second derivatives .* not symmetric"),
        geometry.quadratic_model(drawn_batch()) as quadratic,
        exact.quadratic_model(drawn_batch()) as reference,
    ):
        product, expected = (flat(model.product(model.gradient)) for model in (quadratic, reference))
    assert relative_error(product, expected) < 1e-6

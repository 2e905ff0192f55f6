"""The frozen problem: forms of batches and models, micro-batches, and that nothing of the model changes."""

from collections import UserDict, namedtuple
from collections.abc import Mapping
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import llqr
from geometries import flat_geometry
from references import (
    DIFFERENCES,
    TOLERANCE,
    dense_fisher,
    dense_gradient,
    flat,
    relative_error,
)
from small_models import case, mlp, tokens_loss, translator


def refreshed(model, loss_fn, batch, **options):
    options = {"steps": 3, "lr": 0.05, "ema": 0.0, "engine": "double-backward"} | options
    geometry = flat_geometry(model, loss_fn, **options)
    refresh = geometry.refresh(batch)
    assert refresh.accepted, refresh.reason
    return refresh, geometry.metric.named_factors()


def assert_same(first, second, tolerance=0.0):
    assert first[0].loss == pytest.approx(second[0].loss, rel=tolerance)
    assert first[0].objective_after == pytest.approx(second[0].objective_after, rel=tolerance)
    assert set(first[1]) == set(second[1])
    for name, factor in first[1].items():
        # The distance from where it started is what was learned.
        torch.testing.assert_close(factor, second[1][name], rtol=tolerance, atol=tolerance)


# -- forms of batches --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["targets", "target", "labels", "label", "y"])
def test_a_mapping_with_targets(key):
    drawn = case("translator")
    (source, target), labels = drawn.batch
    expected = refreshed(drawn.model, tokens_loss, drawn.batch)
    assert_same(
        refreshed(
            drawn.model,
            tokens_loss,
            {"source": source, "target_": target, key: labels},
            forward=lambda model, inputs: model(inputs["source"], inputs["target_"]),
        ),
        expected,
    )


def test_keywords_tuples_lists_and_callables():
    drawn = case("translator")
    (source, target), labels = drawn.batch
    expected = refreshed(drawn.model, tokens_loss, drawn.batch)
    assert_same(refreshed(drawn.model, tokens_loss, ({"source": source, "target": target}, labels)), expected)
    assert_same(refreshed(drawn.model, tokens_loss, [[source, target], labels]), expected)
    assert_same(refreshed(drawn.model, tokens_loss, lambda: drawn.batch), expected)
    for key in ("targets", "labels"):
        spread = {"source": source, "target": target, key: labels}
        assert_same(refreshed(drawn.model, tokens_loss, lambda spread=spread: spread), expected)


def test_a_batch_of_another_size_may_be_drawn():
    drawn = case("mlp")
    sizes = []

    def loss_fn(outputs, targets):
        sizes.append(len(outputs))
        return F.cross_entropy(outputs, targets)

    refreshed(drawn.model, loss_fn, lambda: (drawn.batch[0][:2], drawn.batch[1][:2]))
    assert set(sizes) == {2}


@pytest.mark.parametrize("bad", [torch.zeros(3, 4), None, (torch.zeros(3, 4),), (1, 2, 3), lambda: 5, "xy"])
def test_bad_batches_raise_a_clear_error(bad):
    with pytest.raises(TypeError, match=r"^batch: expected \(inputs, targets\), a mapping with targets, or a callable"):
        flat_geometry(mlp(), F.cross_entropy).refresh(bad)


def test_a_mapping_without_targets_raises_a_clear_error():
    with pytest.raises(ValueError, match=r"^batch: a mapping needs one of the keys targets, .*, got x, z"):
        flat_geometry(mlp(), F.cross_entropy).refresh({"x": torch.zeros(3, 4), "z": torch.zeros(3)})


def test_after_a_bad_batch_the_refresh_is_still_due():
    drawn = case("mlp")
    geometry = flat_geometry(drawn.model, F.cross_entropy, steps=2)
    with pytest.raises(TypeError):
        geometry.refresh(drawn.batch[0])
    assert geometry.due
    assert geometry.refreshes == geometry.failures == 0
    assert geometry.refresh(drawn.batch).accepted


# -- forms of models ---------------------------------------------------------------------------------------------------


def test_forward_adapts_the_call():
    drawn = case("mlp")

    class Two(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x, *, scale):
            return SimpleNamespace(logits=scale * self.inner(x), hidden=x), None

    expected = refreshed(drawn.model, lambda z, t: F.cross_entropy(2 * z, t), drawn.batch)
    wrapped = refreshed(Two(drawn.model), F.cross_entropy, drawn.batch, forward=lambda m, x: m(x, scale=2)[0].logits)
    assert wrapped[0].loss == pytest.approx(expected[0].loss, rel=1e-12)
    for name, factor in expected[1].items():
        torch.testing.assert_close(wrapped[1][f"inner.{name}"], factor, rtol=1e-11, atol=1e-12)


def test_logits_are_taken_from_objects():
    drawn = case("mlp")

    class Wrapped(nn.Sequential):
        def forward(self, x):
            return SimpleNamespace(logits=super().forward(x))

    assert_same(
        refreshed(Wrapped(*drawn.model), F.cross_entropy, drawn.batch),
        refreshed(drawn.model, F.cross_entropy, drawn.batch),
    )


def test_outputs_that_are_no_tensor_raise_a_clear_error():
    class Pair(nn.Sequential):
        def forward(self, x):
            return super().forward(x), None

    with pytest.raises(TypeError, match=r"^forward: expected a tensor of outputs, got tuple"):
        flat_geometry(Pair(*mlp()), F.cross_entropy).refresh(case("mlp").batch)


def test_a_type_error_inside_the_model_is_its_own():
    class Broken(nn.Sequential):
        def forward(self, x):
            raise TypeError("units do not match")

    with pytest.raises(TypeError, match=r"^units do not match"):
        flat_geometry(Broken(*mlp()), F.cross_entropy).refresh(case("mlp").batch)


@pytest.mark.parametrize("loss_fn", [lambda z, t: F.cross_entropy(z, t, reduction="none"), lambda z, t: 1.0])
def test_a_loss_that_is_not_one_number_raises_a_clear_error(loss_fn):
    with pytest.raises(TypeError, match=r"^loss_fn: expected one number, the mean loss over the batch"):
        flat_geometry(mlp(), loss_fn).refresh(case("mlp").batch)


# -- micro-batches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("divergence", ["ngd", "newton"])
@pytest.mark.parametrize("size", [1, 3, 7, 100])
@pytest.mark.parametrize("structure", ["e-kfac", "diagonal"])
def test_micro_batches_change_nothing(structure, size, divergence):
    drawn = case("mlp")
    options = {"structure": structure, "divergence": divergence}
    whole = refreshed(drawn.model, F.cross_entropy, drawn.batch, **options)
    pieces = refreshed(drawn.model, F.cross_entropy, drawn.batch, micro_batch=size, **options)
    assert_same(pieces, whole, tolerance=1e-10)


@pytest.mark.parametrize("engine", ["forward", *DIFFERENCES])
def test_micro_batches_in_other_engines(engine):
    drawn = case("mlp")
    options = {"steps": 2, "divergence": "newton"}
    whole = refreshed(drawn.model, F.cross_entropy, drawn.batch, **options)
    pieces = refreshed(drawn.model, F.cross_entropy, drawn.batch, micro_batch=3, engine=engine, **options)
    assert_same(pieces, whole, tolerance=1e-10 if engine == "forward" else 1e-6)


def test_micro_batches_with_ignored_tokens_unevenly_spread():
    """The mean is over all targets at once, not a mean of the pieces' means."""
    drawn = case("translator")
    targets = drawn.batch[1].clone()
    targets[0] = -100
    targets[1, 2] = -100
    batch = drawn.batch[0], targets
    whole = refreshed(drawn.model, tokens_loss, batch)
    assert_same(refreshed(drawn.model, tokens_loss, batch, micro_batch=1), whole, tolerance=1e-10)


Named = namedtuple("Named", ["source", "target"])


@pytest.mark.parametrize(
    "form",
    [
        lambda s, t: (s, t),
        lambda s, t: [s, t],
        lambda s, t: {"source": s, "target": t},
        Named,
        lambda s, t: {"a": [s, {"b": t}], "c": None, "d": 3},
        lambda s, t: UserDict(source=s, target=t),
    ],
    ids=["tuple", "list", "dict", "named tuple", "nested", "another mapping"],
)
def test_micro_batches_of_nested_inputs(form):
    torch.manual_seed(0)
    source, target, labels = (torch.randint(5, (5, 3)) for _ in range(3))
    inputs, model = form(source, target), translator()

    def forward(model, inputs):
        if isinstance(inputs, Named):
            return model(inputs.source, inputs.target)
        if isinstance(inputs, Mapping):
            return model(inputs["a"][0], inputs["a"][1]["b"]) if "a" in inputs else model(**inputs)
        return model(*inputs)

    whole = refreshed(model, tokens_loss, (inputs, labels), forward=forward, steps=2)
    pieces = refreshed(model, tokens_loss, (inputs, labels), forward=forward, micro_batch=2, steps=2)
    assert_same(pieces, whole, tolerance=1e-10)


def test_micro_batches_really_are_small():
    drawn, sizes = case("mlp"), []
    drawn.model.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    refreshed(drawn.model, F.cross_entropy, drawn.batch, micro_batch=3, steps=1)
    assert set(sizes) == {3, 1}


@pytest.mark.parametrize("size", [0, -2])
def test_a_bad_micro_batch_raises_a_clear_error(size):
    with pytest.raises(ValueError, match=r"^micro_batch: expected a positive number of samples"):
        flat_geometry(mlp(), F.cross_entropy, micro_batch=size).refresh(case("mlp").batch)


def test_micro_batches_need_a_tensor_to_cut():
    x, y = case("mlp").batch
    geometry = flat_geometry(mlp(), F.cross_entropy, micro_batch=2, forward=lambda model, _: model(x))
    with pytest.raises(ValueError, match=r"^micro_batch: found no tensor with a batch dimension in the inputs"):
        geometry.refresh((None, y))


# -- nothing changes ---------------------------------------------------------------------------------------------------


class Restless(nn.Module):
    """Writes to a buffer and draws random numbers even in eval mode."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        self.calls += 1
        torch.rand(3)
        return self.drop(x)


def restless_cnn():
    drawn = case("batch-norm-cnn")
    drawn.model.insert(5, Restless())
    drawn.model.train()
    drawn.model[1].eval()  # a BatchNorm the user has frozen
    F.cross_entropy(drawn.model(drawn.batch[0]), drawn.batch[1]).backward()
    return drawn


def everything(model):
    return (
        {name: buffer.clone() for name, buffer in model.named_buffers()},
        {name: p.detach().clone() for name, p in model.named_parameters()},
        {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        {name: p.requires_grad for name, p in model.named_parameters()},
        {name: module.training for name, module in model.named_modules()},
        torch.get_rng_state(),
        [p.data_ptr() for p in model.parameters()],
    )


def assert_unchanged(before, after):
    for old, new in zip(before[:3], after[:3], strict=True):
        for name, tensor in old.items():
            assert tensor.equal(new[name]), name
    assert before[3:5] == after[3:5]
    assert before[5].equal(after[5])
    assert before[6] == after[6]


@pytest.mark.parametrize(
    ("engine", "divergence"), [*((engine, "ngd") for engine in ("auto", *llqr.ENGINES)), ("double-backward", "newton")]
)
def test_a_refresh_leaves_no_trace(engine, divergence):
    drawn = restless_cnn()
    before = everything(drawn.model)
    geometry = flat_geometry(drawn.model, drawn.loss_fn, divergence=divergence, steps=2, engine=engine)
    assert geometry.refresh(drawn.batch).accepted
    assert_unchanged(before, everything(drawn.model))


@pytest.mark.parametrize("where", ["loss", "model", "batch"])
def test_a_refresh_that_raises_leaves_no_trace(where):
    drawn = restless_cnn()
    before = everything(drawn.model)

    def fail(*_):
        raise KeyError("on purpose")

    geometry = flat_geometry(drawn.model, fail if where == "loss" else drawn.loss_fn, steps=2)
    handle = drawn.model[-1].register_forward_hook(fail) if where == "model" else None
    with pytest.raises(KeyError, match="on purpose"):
        geometry.refresh(fail if where == "batch" else drawn.batch)
    if handle is not None:
        handle.remove()
    assert_unchanged(before, everything(drawn.model))


def test_a_refresh_runs_in_eval_mode():
    """Running statistics instead of the batch's, and no dropout."""
    drawn = case("batch-norm-cnn")
    drawn.model.train()
    refresh, _ = refreshed(drawn.model, F.cross_entropy, drawn.batch)
    drawn.model.eval()
    loss = F.cross_entropy(drawn.model(drawn.batch[0]), drawn.batch[1])
    assert refresh.loss == pytest.approx(loss.item(), rel=1e-12)
    gradient = dense_gradient(drawn.model, drawn.loss_fn, drawn.batch)
    assert refresh.gradient_norm == pytest.approx(float(gradient.norm()), rel=1e-12)


def test_a_callers_contexts_do_not_matter():
    drawn = case("mlp")
    model, batch = drawn.model.float(), (drawn.batch[0].float(), drawn.batch[1])
    for structure in ("e-kfac", "dense"):
        expected = refreshed(model, F.cross_entropy, batch, structure=structure)
        with torch.no_grad():
            assert_same(refreshed(model, F.cross_entropy, batch, structure=structure), expected)
        with torch.autocast("cpu", torch.bfloat16):
            assert_same(refreshed(model, F.cross_entropy, batch, structure=structure), expected)


def test_autocast_is_used_when_asked_for():
    drawn = case("mlp")
    model, batch = drawn.model.float(), (drawn.batch[0].float(), drawn.batch[1])
    seen = []
    model.register_forward_hook(lambda module, inputs, outputs: seen.append(outputs.dtype))
    exact = refreshed(model, F.cross_entropy, batch)
    assert set(seen) == {torch.float32}
    seen.clear()
    rounded = refreshed(model, F.cross_entropy, batch, autocast=torch.bfloat16)
    assert set(seen) == {torch.bfloat16}
    assert rounded[0].loss == pytest.approx(exact[0].loss, rel=0.02)
    assert rounded[0].loss != exact[0].loss
    assert relative_error(flat(rounded[1]), flat(exact[1])) < 0.02


class Twice(nn.Module):
    """One module held at two places, and one parameter held by two modules."""

    def __init__(self):
        super().__init__()
        shared = nn.Linear(4, 4)
        self.first, self.second = nn.Sequential(shared), nn.Sequential(shared)
        self.third = nn.Linear(4, 4)
        self.third.weight = shared.weight

    def forward(self, x):
        return self.third(self.second(self.first(x).tanh()).tanh())


@pytest.mark.parametrize("engine", ["linearised", "forward"])
def test_modules_and_parameters_held_twice(engine):
    model = Twice().double()
    before = dict(model.named_parameters(remove_duplicate=False))
    batch = torch.randn(6, 4, dtype=torch.float64), torch.randint(4, (6,))
    geometry = flat_geometry(model, F.cross_entropy, steps=2, engine=engine)
    assert geometry.refresh(batch).accepted
    after = dict(model.named_parameters(remove_duplicate=False))
    assert before.keys() == after.keys()
    assert all(after[name] is parameter for name, parameter in before.items())
    v = {name: torch.randn_like(p) for name, p in geometry.parameters.items()}
    with geometry.quadratic_model(batch) as quadratic:
        product = quadratic.product(v)
    assert relative_error(flat(product), dense_fisher(model, batch[0]) @ flat(v)) < TOLERANCE[engine]


def test_micro_batches_are_refused_where_outputs_depend_on_the_whole_batch():
    def geometry(track, micro_batch):
        norm = nn.BatchNorm1d(6, track_running_stats=track)
        model = nn.Sequential(nn.Linear(5, 6), norm, nn.Linear(6, 3))
        return flat_geometry(model, F.cross_entropy, micro_batch=micro_batch)

    geometry(True, 2)
    geometry(False, None)
    with pytest.raises(ValueError, match=r"micro_batch: '1' is a BatchNorm1d without running statistics"):
        geometry(False, 2)


class Detached(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            return super().forward(x)


class Hidden(nn.Linear):
    """Reads its weights from a list, where nothing can be given in their places."""

    def __init__(self):
        super().__init__(4, 3)
        self.kept = [self.weight, self.bias]

    def forward(self, x):
        return F.linear(x, *self.kept)


@pytest.mark.parametrize("engine", ["auto", "double-backward", *DIFFERENCES])
@pytest.mark.parametrize("model", [Detached(4, 3), Hidden()], ids=["detached", "hidden"])
def test_outputs_that_do_not_depend_on_the_weights_are_refused(model, engine):
    geometry = flat_geometry(model, F.cross_entropy, steps=2, engine=engine)
    with pytest.raises(RuntimeError, match="model: its outputs do not depend on its parameters"):
        geometry.refresh((torch.randn(6, 4), torch.randint(3, (6,))))
    assert not geometry.metric.learned

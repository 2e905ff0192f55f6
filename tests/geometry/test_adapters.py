"""Losses and models that are not of the plain kind: adapted, or named if nothing can be learned from them."""

import functools
import warnings

import pytest
import torch
from torch import nn

import llqr
from geometries import flat_geometry
from traps.training import batches, cross_entropy, mlp, quick_geometry


class LanguageModel(nn.Module):
    """Computes its own loss if it is given labels, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(7, 6), nn.Linear(6, 7)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.embed(input_ids).cumsum(1))
        loss = None if labels is None else llqr.ShiftedCrossEntropy()(logits, labels)
        return type("Outputs", (), {"logits": logits, "loss": loss})()


def test_a_causal_language_model():
    model, tokens = LanguageModel(), torch.randint(7, (4, 9))
    labels = tokens.clone()
    labels[:, -2:] = -100
    geometry = flat_geometry(model, llqr.ShiftedCrossEntropy(), steps=2)
    report = geometry.refresh({"input_ids": tokens, "labels": labels})
    assert report.accepted
    assert report.loss == pytest.approx(model(tokens, labels).loss.item())


class EncoderDecoder(LanguageModel):
    """Makes the decoder's inputs of the labels, which a refresh keeps for the loss."""

    def forward(self, input_ids, decoder_input_ids=None, labels=None):
        if decoder_input_ids is None and labels is None:
            raise ValueError("specify decoder_input_ids or labels")
        return super().forward(input_ids if labels is None else labels)


def test_a_model_that_needs_its_targets_among_its_inputs():
    tokens = torch.randint(7, (4, 9))
    geometry = flat_geometry(EncoderDecoder(), llqr.ShiftedCrossEntropy(), steps=2)
    with pytest.raises(
        ValueError,
        match=r"(?s)^specify.*batch: EncoderDecoder was called on the inputs alone.*forward=",
    ):
        geometry.refresh({"input_ids": tokens, "labels": tokens})
    assert geometry.refresh({"input_ids": tokens, "decoder_input_ids": tokens, "labels": tokens}).accepted


def test_the_shifted_loss_has_the_curvature_of_the_plain_one_on_what_it_compares():
    """Including the number of terms, by which the curvature is scaled."""
    tokens = torch.randint(7, (4, 9))
    shifted = flat_geometry(LanguageModel(), llqr.ShiftedCrossEntropy(), steps=3, lr=0.01)
    plain = flat_geometry(
        LanguageModel(),
        lambda logits, targets: cross_entropy(logits.flatten(0, 1), targets.flatten()),
        forward=lambda model, inputs: model(inputs).logits[:, :-1],
        steps=3,
        lr=0.01,
    )
    shifted.refresh((tokens, tokens))
    plain.refresh((tokens, tokens[:, 1:]))
    for name, factor in shifted.metric.named_factors().items():
        torch.testing.assert_close(factor, plain.metric.named_factors()[name], rtol=1e-5, atol=1e-6)


class TwoHeads(nn.Linear):
    def forward(self, x):
        return super().forward(x).split([2, 1], -1)


class WithLogits(nn.Linear):
    def forward(self, inputs, labels=None):
        logits = super().forward(inputs)
        loss = None if labels is None else cross_entropy(logits, labels)
        return type("Outputs", (), {"logits": logits, "loss": loss})()


class LossFirst(nn.Linear):
    def forward(self, x):
        return None, super().forward(x), "something else"


def two_losses(outputs, targets):
    return cross_entropy(outputs[:, :2], targets % 2) + outputs[:, 2].square().mean()


@pytest.mark.parametrize(
    ("kind", "loss_fn", "forward"),
    [
        (TwoHeads, two_losses, lambda model, x: torch.cat(model(x), -1)),
        (LossFirst, cross_entropy, lambda model, x: model(x)[1]),
        (WithLogits, cross_entropy, None),
    ],
)
def test_outputs_of_other_forms_give_the_metric_of_plain_ones(kind, loss_fn, forward):
    torch.manual_seed(0)
    plain, model, (batch,) = nn.Linear(5, 3), kind(5, 3), batches(1)
    model.load_state_dict(plain.state_dict())
    learned, expected = flat_geometry(model, loss_fn, forward=forward), flat_geometry(plain, loss_fn)
    assert learned.refresh(batch if forward else {"inputs": batch[0], "labels": batch[1]}).accepted
    expected.refresh(batch)
    for name, factor in expected.metric.named_factors().items():
        assert learned.metric.named_factors()[name].equal(factor)


@pytest.mark.parametrize(
    "loss_fn", [nn.CrossEntropyLoss(reduction="sum"), functools.partial(cross_entropy, reduction="sum")]
)
def test_a_loss_that_says_it_is_a_sum_is_refused(loss_fn):
    with pytest.raises(ValueError, match=r"loss_fn: it is a sum over the batch \(reduction='sum'\)"):
        quick_geometry(mlp()).__class__(mlp(), loss_fn)


def test_a_loss_that_behaves_as_a_sum_is_named():
    geometry = flat_geometry(mlp(), lambda z, y: cross_entropy(z, y, reduction="sum"), steps=2)
    with pytest.warns(llqr.RefreshWarning, match="loss_fn: it doubles when every sample is taken twice"):
        geometry.refresh(batches(1)[0])


def test_a_mean_is_not():
    with warnings.catch_warnings():
        warnings.simplefilter("error", llqr.RefreshWarning)
        quick_geometry(mlp()).refresh(batches(1)[0])


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda z, y: (torch.linspace(0, 1, 16) * cross_entropy(z, y, reduction="none")).mean(),
        lambda z, y: cross_entropy(z.view(16, 3), y),
        lambda z, y: cross_entropy(z, y) if len(z) == 16 else None,
    ],
    ids=["weights", "view", "none"],
)
def test_a_loss_may_know_the_size_of_its_batch(loss_fn):
    """It is asked about a batch of twice the size, whether it is a sum; one that cannot answer is taken for a mean."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", llqr.RefreshWarning)
        assert flat_geometry(mlp(), loss_fn, steps=2).refresh(batches(1)[0]).accepted


PAD = 0
PADDED = functools.partial(cross_entropy, ignore_index=PAD)


@pytest.mark.parametrize(
    "loss_fn",
    [PADDED, nn.CrossEntropyLoss(ignore_index=PAD), nn.CrossEntropyLoss(weight=torch.tensor([0.1, 1.0, 2.0]))],
    ids=["partial", "module", "weights"],
)
def test_ignored_targets_and_weights_get_no_warning(loss_fn):
    with warnings.catch_warnings():
        warnings.simplefilter("error", llqr.RefreshWarning)
        flat_geometry(mlp(), loss_fn, steps=2).refresh(batches(1)[0])


def test_log_probabilities_get_the_loss_that_has_a_curvature():
    """As an equivalent of `nll_loss`, which is linear in them; the metric is that of the scores."""
    scores = mlp(torch.float64)
    model, (batch,) = nn.Sequential(*scores, nn.LogSoftmax(1)), batches(1, dtype=torch.float64)
    with pytest.warns(llqr.RefreshWarning, match=r"nll_loss of log-probabilities pass cross_entropy"):
        flat_geometry(model, nn.functional.nll_loss, steps=2).refresh(batch)
    found, expected = (flat_geometry(one, cross_entropy, steps=2, lr=0.1) for one in (model, scores))
    assert found.refresh(batch).loss == pytest.approx(expected.refresh(batch).loss)
    torch.testing.assert_close(found.metric.named_factors(), expected.metric.named_factors())


def test_a_loss_without_second_derivatives_is_named():
    with pytest.raises(RuntimeError, match=r"^loss_fn: torch cannot differentiate it twice, .*\(.*multi_margin_loss"):
        flat_geometry(mlp(), nn.functional.multi_margin_loss, steps=2).refresh(batches(1)[0])


@pytest.mark.parametrize("per_sample", [True, False])
def test_a_forward_that_returns_the_loss_is_named(per_sample):
    def forward(model, inputs):
        x, y = inputs
        loss = cross_entropy(model(x), y, reduction="none")
        return loss if per_sample else loss.mean()

    geometry = flat_geometry(mlp(), lambda loss, _: loss.mean(), forward=forward, steps=2)
    with pytest.warns(llqr.RefreshWarning, match=r"curvature along the gradient is zero.*forward= return the loss"):
        geometry.refresh((batches(1)[0], torch.zeros(16)))


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (torch.randn(16, 4), "shapes cannot be multiplied"),
        (torch.randn(16, 5).double(), "dtype"),
        (torch.ones(16, 5).long(), "dtype"),
    ],
    ids=["shape", "float64", "integers"],
)
def test_a_batch_that_the_model_does_not_take_is_named(bad, says):
    geometry = flat_geometry(mlp(), cross_entropy, steps=2)
    with pytest.raises(RuntimeError, match=rf"^batch: the model cannot be called on its inputs \(.*{says}"):
        geometry.refresh((bad, torch.randint(3, (16,))))


@pytest.mark.parametrize(
    "batch",
    [{"input": torch.zeros(16, 5), "id": list(range(16)), "labels": torch.zeros(16).long()}, ([1, 2], torch.zeros(2))],
    ids=["mapping", "list"],
)
def test_inputs_that_are_not_the_arguments_of_the_model_name_the_way_out(batch):
    geometry = flat_geometry(mlp(), cross_entropy, steps=2)
    with pytest.raises(TypeError, match=r"(?s)batch: Sequential was called on the inputs alone.*forward="):
        geometry.refresh(batch)


def test_a_type_error_inside_the_model_stays_as_it_is():
    def forward(model, inputs):
        return model(inputs) + len(3)

    with pytest.raises(TypeError, match=r"^object of type 'int' has no len"):
        flat_geometry(mlp(), cross_entropy, forward=forward, steps=2).refresh(batches(1)[0])


@pytest.mark.parametrize(
    ("loss_fn", "says"),
    [
        (lambda outputs, targets: cross_entropy(outputs, targets.int()), "it cannot be computed .*expected"),
        (lambda outputs, targets: cross_entropy(outputs[:1], targets), "it cannot be computed .*batch_size"),
        (lambda outputs, targets: cross_entropy(outputs.sum(), targets), "it cannot be computed .*Dimension"),
        (lambda outputs, targets: cross_entropy(outputs.detach(), targets), "it does not depend on the outputs"),
    ],
    ids=["dtype", "batch", "number", "detached"],
)
def test_a_loss_that_fails_is_named_and_not_the_engine(loss_fn, says):
    with pytest.raises(RuntimeError, match=f"^loss_fn: {says}") as raised:
        flat_geometry(mlp(), loss_fn, steps=2).refresh(batches(1)[0])
    assert "no way to differentiate" not in str(raised.getrepr(chain=True, style="short"))


def test_running_out_of_memory_does_not_choose_an_engine():
    model, failing = mlp(), [True]

    def forward(module, x):
        if failing:
            failing.clear()
            raise torch.OutOfMemoryError("no memory")
        return module(x)

    geometry = flat_geometry(model, cross_entropy, forward=forward, steps=2)
    (batch,) = batches(1)
    with pytest.raises(torch.OutOfMemoryError):
        geometry.refresh(batch)
    assert geometry.engine == "auto"
    geometry.refresh(batch)
    assert geometry.engine == "double-backward"


def test_parameters_that_are_replaced_are_named():
    model, (batch,) = mlp(), batches(1)
    geometry = quick_geometry(model)
    geometry.refresh(batch)
    model.load_state_dict({name: p.clone() for name, p in model.state_dict().items()}, assign=True)
    with pytest.raises(RuntimeError, match=r"model: '0.weight' is another tensor than when the geometry was made"):
        geometry.refresh(batch)

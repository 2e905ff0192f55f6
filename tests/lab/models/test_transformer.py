"""The translation transformer: fairseq's sizes and initialisation, PyTorch's layers as reference, padding, decoding."""

import functools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from llqr.lab.models.transformer import TranslationTransformer, differentiable_forward
from small_models import tokens_loss

PAD = 0
loss_fn = functools.partial(tokens_loss, ignore_index=PAD)


def small(**options) -> TranslationTransformer:
    settings = {"width": 16, "feed_forward": 24, "heads": 2, "layers": 2, "dropout": 0.0} | options
    return TranslationTransformer(11, **settings).double()


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, 11, shape)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def by_hand(vocabularies: int, width: int = 512, hidden: int = 1024, layers: int = 6, final_norms: int = 0) -> int:
    attention = 4 * (width * width + width)
    feed_forward = 2 * width * hidden + hidden + width
    norm = 2 * width
    encoder, decoder = attention + feed_forward + 2 * norm, 2 * attention + feed_forward + 3 * norm
    return vocabularies * width + layers * (encoder + decoder) + final_norms * norm


def test_the_default_has_the_size_fairseq_reports():
    """39,469,056 with dictionaries of 8848 and 6632 tokens, the embedding of the second tied to the outputs."""
    with torch.device("meta"):
        model = TranslationTransformer((8848 + 6632) // 2)
    assert parameters(model) == by_hand(8848 + 6632) == 39_469_056


@pytest.mark.parametrize(("tie", "matrices"), [("all", 1), ("decoder", 2), ("none", 3)])
@pytest.mark.parametrize(("norm", "final_norms"), [("post", 0), ("pre", 2)])
def test_sizes_of_the_variants(tie, matrices, norm, final_norms):
    with torch.device("meta"):
        model = TranslationTransformer(1000, tie=tie, norm=norm)
    assert parameters(model) == by_hand(1000 * matrices, final_norms=final_norms)


def test_every_projection_is_a_separate_matrix_and_the_tied_one_counts_once():
    shapes = {name: tuple(parameter.shape) for name, parameter in small().named_parameters()}
    layer = {name.removeprefix("decoder.0.") for name in shapes if name.startswith("decoder.0.")}
    assert {f"{kind}.{part}.weight" for kind in ("attention", "source_attention") for part in "qkv"} < layer
    assert shapes["decoder.0.source_attention.out.weight"] == (16, 16)
    assert [name for name, shape in shapes.items() if shape[0] == 11] == [
        "source_embedding.weight",
        "target_embedding.weight",
    ]


def test_the_initialisation_is_that_of_fairseq():
    model = TranslationTransformer(4000)
    for embedding in (model.source_embedding, model.target_embedding):
        weight = embedding.weight.detach()
        assert not weight[PAD].any()
        assert float(weight[1:].std()) * 512**0.5 == pytest.approx(1, abs=0.01)
    layer = model.decoder[2]
    # Xavier: uniform within sqrt(6 / (in + out)), times 1 / sqrt(2) for queries, keys and values.
    bounds = {
        layer.source_attention.q: (6 / 1024 / 2) ** 0.5,
        layer.attention.v: (6 / 1024 / 2) ** 0.5,
        layer.attention.out: (6 / 1024) ** 0.5,
        layer.feed_forward.expand: (6 / 1536) ** 0.5,
        layer.feed_forward.contract: (6 / 1536) ** 0.5,
    }
    for projection, bound in bounds.items():
        weight = projection.weight.detach()
        assert float(weight.abs().max()) == pytest.approx(bound, rel=1e-3)
        assert float(weight.std()) == pytest.approx(bound / 3**0.5, rel=0.01)
    for projection in (layer.attention.out, layer.feed_forward.expand, layer.feed_forward.contract):
        assert not projection.bias.any()
    assert not torch.equal(layer.attention.q.weight, layer.attention.k.weight)


def test_untied_outputs_are_initialised_like_embeddings_with_a_row_for_padding():
    model = TranslationTransformer(4000, width=64, layers=1, tie="none")
    assert float(model.head.weight.detach().std()) * 64**0.5 == pytest.approx(1, abs=0.01)
    assert model.head.weight[PAD].any()


def test_embeddings_are_scaled_tokens_plus_sinusoids():
    model = small()
    rows = torch.tensor([[5, 6, 7, PAD]])
    vectors = model._embed(model.source_embedding, rows)
    for place, token in enumerate([5, 6, 7]):
        angles = [(place + 1) * 10000 ** (-k / 7) for k in range(8)]
        sinusoids = torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles])
        expected = 4 * model.source_embedding.weight[token] + sinusoids
        torch.testing.assert_close(vectors[0, place], expected, rtol=0, atol=1e-6)  # the table is float32
    assert not vectors[0, 3].any()


def pytorchs(model: TranslationTransformer, norm: str) -> tuple[nn.TransformerEncoder, nn.TransformerDecoder]:
    """PyTorch's own stacks with the weights of this model."""
    settings = {"dropout": 0.0, "batch_first": True, "norm_first": norm == "pre", "dtype": torch.float64}
    last = [nn.LayerNorm(16, dtype=torch.float64) if norm == "pre" else None for _ in range(2)]
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, **settings), 2, last[0], False)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 24, **settings), 2, last[1])

    def copy_attention(ours, theirs):
        theirs.in_proj_weight.copy_(torch.cat([ours.q.weight, ours.k.weight, ours.v.weight]))
        theirs.in_proj_bias.copy_(torch.cat([ours.q.bias, ours.k.bias, ours.v.bias]))
        theirs.out_proj.load_state_dict(ours.out.state_dict())

    def copy_layer(ours, theirs, norms):
        copy_attention(ours.attention, theirs.self_attn)
        theirs.linear1.load_state_dict(ours.feed_forward.expand.state_dict())
        theirs.linear2.load_state_dict(ours.feed_forward.contract.state_dict())
        for number, residual in enumerate(norms, start=1):
            getattr(theirs, f"norm{number}").load_state_dict(residual.norm.state_dict())

    with torch.no_grad():
        for ours, theirs in zip(model.encoder, encoder.layers, strict=True):
            copy_layer(ours, theirs, [ours.around_attention, ours.around_feed_forward])
        for ours, theirs in zip(model.decoder, decoder.layers, strict=True):
            copy_layer(ours, theirs, [ours.around_attention, ours.around_source_attention, ours.around_feed_forward])
            copy_attention(ours.source_attention, theirs.multihead_attn)
        if norm == "pre":
            encoder.norm.load_state_dict(model.encoder_norm.state_dict())
            decoder.norm.load_state_dict(model.decoder_norm.state_dict())
    return encoder, decoder


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_the_layers_equal_those_of_pytorch(norm):
    model = small(norm=norm)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))  # norms and biases away from their initial values
    source, previous = tokens(3, 5), tokens(3, 4)
    source[0, 3:] = PAD
    encoder, decoder = pytorchs(model, norm)
    missing = source == PAD
    memory = encoder(model._embed(model.source_embedding, source), src_key_padding_mask=missing)
    future = torch.ones(4, 4, dtype=torch.bool).triu(1)
    x = decoder(
        model._embed(model.target_embedding, previous), memory, tgt_mask=future, memory_key_padding_mask=missing
    )
    expected = x @ model.target_embedding.weight.T
    torch.testing.assert_close(model(source, previous), expected, rtol=0, atol=1e-12)


@given(left=st.integers(0, 3), right=st.integers(0, 3), rows=st.integers(0, 2))
def test_padding_has_no_effect(left, right, rows):
    """Any amount of it: before or after a source, after previous tokens, and in whole rows."""
    model = small()
    source, previous, targets = tokens(2, 4), tokens(2, 3), tokens(2, 3)

    def padded(batch: Tensor, before: int, after: int) -> Tensor:
        wide = nn.functional.pad(batch, (before, after), value=PAD)
        return torch.cat([wide, wide.new_full((rows, wide.shape[1]), PAD)])

    logits = model(source, previous)
    plain = torch.autograd.grad(loss_fn(logits, targets), list(model.parameters()))
    more = model(padded(source, left, right), padded(previous, 0, right))
    torch.testing.assert_close(more[:2, :3], logits, rtol=0, atol=1e-12)
    assert more.isfinite().all()
    slopes = torch.autograd.grad(loss_fn(more, padded(targets, 0, right)), list(model.parameters()))
    for found, expected in zip(slopes, plain, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("exact", [True, False], ids=["composed", "fused"])
def test_rows_of_padding_only_have_finite_logits_and_gradients(norm, exact):
    """Even where a loss does not ignore them."""
    model = small(norm=norm)
    nothing = torch.full((2, 3), PAD)
    logits = differentiable_forward(model, (nothing, nothing)) if exact else model(nothing, nothing)
    assert logits.isfinite().all()
    logits.square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_no_token_depends_on_later_tokens():
    model = small()
    source, previous = tokens(2, 5), tokens(2, 6)
    logits = model(source, previous)
    later = previous.clone()
    later[:, 3:] = (later[:, 3:] - 2) % 8 + 3
    changed = model(source, later)
    torch.testing.assert_close(changed[:, :3], logits[:, :3], rtol=0, atol=1e-13)
    assert (changed[:, 3:] - logits[:, 3:]).abs().amax(dim=2).min() > 1e-3


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("tie", ["decoder", "all", "none"])
def test_decoding_token_by_token_equals_one_pass(norm, tie):
    model = small(norm=norm, tie=tie).eval()
    source, previous = tokens(3, 5), tokens(3, 2, 6)
    source[1, 2:] = PAD
    memory, cache = model.encode(source), [[], []]
    steps = [model.decode(previous[:, :, step], memory, cache) for step in range(6)]
    for hypothesis in range(2):
        expected = model(source, previous[:, hypothesis])
        found = torch.stack([step[:, hypothesis] for step in steps], dim=1)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_reordered_hypotheses_decode_correctly():
    model = small().eval()
    source, previous = tokens(2, 4), tokens(2, 3, 5)
    memory, cache = model.encode(source), [[], []]
    for step in range(3):
        model.decode(previous[:, :, step], memory, cache)
    parents = torch.tensor([[2, 0, 0], [1, 1, 2]])
    rows = (parents + torch.tensor([[0], [3]])).flatten()
    cache = [[part[rows] for part in known] for known in cache]
    previous[:, :, :3] = previous[:, :, :3].gather(1, parents.unsqueeze(2).expand(-1, -1, 3))
    for step in (3, 4):
        logits = model.decode(previous[:, :, step], memory, cache)
        for hypothesis in range(3):
            expected = model(source, previous[:, hypothesis, : step + 1])[:, -1]
            torch.testing.assert_close(logits[:, hypothesis], expected, rtol=0, atol=1e-12)


def test_differentiable_attention_equals_the_fused_kernel():
    model = small()
    source, previous = tokens(2, 5), tokens(2, 4)
    source[0, 2:] = PAD
    torch.testing.assert_close(
        differentiable_forward(model, (source, previous)), model(source, previous), rtol=0, atol=1e-13
    )
    with pytest.raises(ValueError, match="max_length"):
        differentiable_forward(small(max_length=4), (source, previous))
    assert torch.backends.cuda.flash_sdp_enabled()  # the choice of kernels is restored, also after an error


def test_a_forward_pass_never_reads_from_the_device():
    """The meta device has no values to read and no shapes that depend on values, as a CUDA graph requires."""
    with torch.device("meta"):
        model = TranslationTransformer(11, width=16, feed_forward=24, heads=2, layers=1)
        batch = torch.zeros(3, 5, dtype=torch.int64), torch.zeros(3, 4, dtype=torch.int64)
        logits = model(*batch)
        logits.sum().backward()
    assert logits.shape == (3, 4, 11)
    assert model.source_embedding.weight.grad.shape == (11, 16)


@pytest.mark.slow
def test_it_compiles_into_one_graph():
    torch.compiler.reset()
    model = small()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    source, previous, targets = tokens(2, 5), tokens(2, 4), tokens(2, 4)
    source[0, 2:] = PAD
    found, expected = compiled(source, previous), model(source, previous)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    weights = list(model.parameters())
    slopes = (torch.autograd.grad(loss_fn(logits, targets), weights) for logits in (found, expected))
    for ours, plain in zip(*slopes, strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-12)


def test_autocast_keeps_the_derivatives_finite():
    model = TranslationTransformer(11, width=16, feed_forward=24, heads=2, layers=2)
    source, previous, targets = tokens(3, 5), tokens(3, 4), tokens(3, 4)
    source[2], previous[2], targets[2] = PAD, PAD, PAD
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_fn(model(source, previous).float(), targets)
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_dropout_is_active_in_training_only():
    model = small(dropout=0.3)
    batch = tokens(2, 5), tokens(2, 4)
    assert not torch.equal(model(*batch), model(*batch))
    model.eval()
    assert torch.equal(model(*batch), model(*batch))


def test_a_saved_model_can_be_loaded():
    model, other = small(), small()
    other.load_state_dict(model.state_dict())
    batch = tokens(2, 5), tokens(2, 4)
    assert torch.equal(model(*batch), other(*batch))
    assert other.head.weight is other.target_embedding.weight
    assert not any("table" in name for name in model.state_dict())


def test_bad_requests_name_the_argument():
    with pytest.raises(ValueError, match="tie must be one of decoder, all, none, got 'both'"):
        small(tie="both")
    with pytest.raises(ValueError, match="norm must be one of post, pre, got 'middle'"):
        small(norm="middle")
    with pytest.raises(ValueError, match="heads must divide width, got heads=3 and width=16"):
        small(heads=3)
    with pytest.raises(ValueError, match="width must be even and at least 4, got 3"):
        small(width=3, heads=1)
    model = small(max_length=4)
    for lengths in ((5, 2), (4, 5)):
        with pytest.raises(ValueError, match="5 tokens exceed max_length=4"):
            model(*(tokens(1, length) for length in lengths))

"""The language model: GPT-2's sizes and initialisation, PyTorch's layers as reference, causality."""

import pytest
import torch
from torch import Tensor, nn

from llqr.lab.models.transformer import LanguageModel, differentiable_forward

# width, heads, layers, parameters: GPT-2 small, medium, large and XL as released.
PUBLISHED = [
    (768, 12, 12, 124_439_808),
    (1024, 16, 24, 354_823_168),
    (1280, 20, 36, 774_030_080),
    (1600, 25, 48, 1_557_611_200),
]


def small(**options) -> LanguageModel:
    settings = {"width": 16, "heads": 2, "layers": 2, "context": 8, "dropout": 0.0} | options
    return LanguageModel(11, **settings).double()


def tokens(*shape: int) -> Tensor:
    return torch.randint(11, shape)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("width", "heads", "layers", "count"), PUBLISHED)
def test_parameter_counts_are_the_published_ones(width, heads, layers, count):
    with torch.device("meta"):
        model = LanguageModel(50257, width=width, heads=heads, layers=layers)
        untied = LanguageModel(50257, width=width, heads=heads, layers=layers, tie=False)
    assert parameters(model) == count
    assert parameters(untied) == count + 50257 * width


def test_the_layers_equal_those_of_pytorch():
    model = small()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))

    def gelu(x):
        return nn.functional.gelu(x, approximate="tanh")

    layer = nn.TransformerEncoderLayer(16, 2, 64, 0.0, gelu, batch_first=True, norm_first=True, dtype=torch.float64)
    stack = nn.TransformerEncoder(layer, 2, nn.LayerNorm(16, dtype=torch.float64), enable_nested_tensor=False)
    with torch.no_grad():
        for ours, theirs in zip(model.blocks, stack.layers, strict=True):
            attention = ours.attention
            theirs.self_attn.in_proj_weight.copy_(torch.cat([getattr(attention, part).weight for part in "qkv"]))
            theirs.self_attn.in_proj_bias.copy_(torch.cat([getattr(attention, part).bias for part in "qkv"]))
            theirs.self_attn.out_proj.load_state_dict(attention.out.state_dict())
            theirs.linear1.load_state_dict(ours.feed_forward.expand.state_dict())
            theirs.linear2.load_state_dict(ours.feed_forward.contract.state_dict())
            theirs.norm1.load_state_dict(ours.around_attention.norm.state_dict())
            theirs.norm2.load_state_dict(ours.around_feed_forward.norm.state_dict())
        stack.norm.load_state_dict(model.norm.state_dict())
    rows = tokens(3, 6)
    x = model.tokens.weight[rows] + model.positions.weight[:6]
    expected = stack(x, mask=torch.ones(6, 6, dtype=torch.bool).triu(1)) @ model.tokens.weight.T
    torch.testing.assert_close(model(rows), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(differentiable_forward(model, rows), expected, rtol=0, atol=1e-12)


def test_no_token_depends_on_later_tokens():
    model = small()
    rows = tokens(2, 6)
    later = rows.clone()
    later[:, 3:] = (later[:, 3:] + 1) % 11
    logits, changed = model(rows), model(later)
    torch.testing.assert_close(changed[:, :3], logits[:, :3], rtol=0, atol=1e-13)
    assert (changed[:, 3:] - logits[:, 3:]).abs().amax(dim=2).min() > 1e-3


def test_the_initialisation_is_that_of_gpt2():
    model = LanguageModel(2000, width=256, heads=4, layers=8, context=64)
    block = model.blocks[3]
    widths = {
        model.tokens: 0.02,
        model.positions: 0.02,
        block.attention.q: 0.02,
        block.feed_forward.expand: 0.02,
        block.attention.out: 0.02 / 4,  # sixteen branches are added
        block.feed_forward.contract: 0.02 / 4,
    }
    for module, width in widths.items():
        assert float(module.weight.detach().std()) == pytest.approx(width, rel=0.02)
    assert not any(p.any() for name, p in model.named_parameters() if name.endswith("bias"))
    assert model.head.weight is model.tokens.weight


def test_a_forward_pass_never_reads_from_the_device():
    with torch.device("meta"):
        model = LanguageModel(11, width=16, heads=2, layers=1, context=8)
        logits = model(torch.zeros(3, 5, dtype=torch.int64))
        logits.sum().backward()
    assert logits.shape == (3, 5, 11)


@pytest.mark.slow
def test_it_compiles_into_one_graph():
    torch.compiler.reset()
    model = small(layers=1)
    rows = tokens(2, 5)
    found = torch.compile(model, backend="aot_eager", fullgraph=True)(rows)
    torch.testing.assert_close(found, model(rows), rtol=0, atol=1e-12)


def test_bad_requests_name_the_argument():
    with pytest.raises(ValueError, match="heads must divide width"):
        small(heads=5)
    with pytest.raises(ValueError, match="tokens: 9 tokens exceed context=8"):
        small()(tokens(1, 9))

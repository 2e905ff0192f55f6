"""The networks: published sizes, shapes, and the derivatives that a curvature product needs."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jvp, vjp
from torch.nn.attention import SDPBackend, sdpa_kernel

from llqr.lab import models
from llqr.lab.models.transformer import differentiable_forward

# name, arguments, parameters: from the original papers and the reference implementations they refer to.
PUBLISHED = [
    ("vgg16-bn", {"classes": 10}, 14_728_266),
    ("vgg16-bn", {"classes": 100}, 14_774_436),
    ("resnet18", {"classes": 10}, 11_173_962),
    ("resnet18", {"classes": 100}, 11_220_132),
    ("wrn28-10", {"classes": 10}, 36_479_194),
    ("wrn28-10", {"classes": 100}, 36_536_884),
    ("pyramidnet110", {"classes": 10}, 28_485_477),
    ("pyramidnet110", {"classes": 100}, 28_511_307),
    ("pyramidnet110", {"alpha": 48}, 1_772_706),
    ("pyramidnet110", {"alpha": 84}, 3_904_446),
    ("pyramidnet110", {"depth": 164, "block": "bottleneck"}, 27_216_021),
    ("pyramidnet110", {"depth": 272, "alpha": 200, "block": "bottleneck"}, 26_210_842),
    ("resnet50", {}, 25_557_032),
    ("vit-ti", {}, 5_717_416),
    ("vit-s", {}, 22_050_664),
    ("vit-b", {}, 86_567_656),
    ("vit-l", {}, 304_326_632),
    ("vit-ti", {"image_size": 64, "patch": 8, "classes": 200}, 5_427_080),
]
SMALL = {
    "mlp": {"image_size": 8, "channels": 1},
    "cnn": {"image_size": 8, "channels": 1, "width": 4},
    "vgg16-bn": {"image_size": 32, "width": 2},
    "resnet18": {"image_size": 16, "width": 2},
    "wrn28-10": {"image_size": 8, "depth": 10, "widen": 1},
    "pyramidnet110": {"image_size": 9, "depth": 8, "alpha": 6},
    "resnet50": {"image_size": 32, "width": 2},
    "vit-ti": {"image_size": 16, "patch": 8, "depth": 2, "dim": 12},
    "vit-s": {"image_size": 16, "patch": 8, "depth": 1, "dim": 12},
    "vit-b": {"image_size": 16, "patch": 8, "depth": 1, "dim": 24},
    "vit-l": {"image_size": 16, "patch": 8, "depth": 1, "dim": 32},
}


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("name", "arguments", "count"), PUBLISHED)
def test_parameter_counts_are_the_published_ones(name, arguments, count):
    with torch.device("meta"):
        assert parameters(models.build(name, **arguments)) == count


def test_attention_projections_have_the_documented_names():
    with torch.device("meta"):
        model = models.build("vit-b")
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if name.startswith("blocks.0.attn.")}
    names = {name.removeprefix("blocks.0.attn.").split(".")[0] for name in shapes}
    assert names == {"qkv", "proj"}
    assert parameters(model) == 86_567_656
    assert model.class_token.shape == (1, 1, 768)
    assert model.positions.shape == (1, 197, 768)


def test_differentiable_attention_equals_the_fused_kernel():
    torch.manual_seed(0)
    model = models.build("vit-ti", image_size=16, patch=4, depth=2, classes=5).double()
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    torch.testing.assert_close(differentiable_forward(model, images), model(images), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", models.BUILDERS)
def test_every_model_has_forward_mode_and_second_derivatives(name):
    """``w . (J v) == (J^T w) . v`` and ``u . (H v) == v . (H u)``: forward and reverse mode agree, H is symmetric."""
    torch.manual_seed(0)
    arguments = SMALL[name]
    model = models.build(name, classes=5, **arguments).double().eval()
    images = torch.randn(2, arguments.get("channels", 3), *[arguments["image_size"]] * 2, dtype=torch.float64)
    weights = {key: value.detach() for key, value in model.named_parameters()}
    u, v = ({key: torch.randn_like(value) for key, value in weights.items()} for _ in range(2))

    def outputs(values):
        with sdpa_kernel(SDPBackend.MATH):  # as `differentiable_forward` does
            return functional_call(model, values, (images,))

    def dot(first, second):
        return sum((first[key] * second[key]).sum() for key in weights)

    logits, pulled_back = vjp(outputs, weights)
    cotangent = torch.randn_like(logits)
    pushed_forward = jvp(outputs, (weights,), (v,))[1]
    assert logits.shape == (2, 5)
    torch.testing.assert_close((cotangent * pushed_forward).sum(), dot(pulled_back(cotangent)[0], v))

    gradient = grad(lambda values: nn.functional.cross_entropy(outputs(values), torch.tensor([0, 1])))
    hv, hu = (jvp(gradient, (weights,), (direction,))[1] for direction in (v, u))
    assert dot(u, hv) != 0
    torch.testing.assert_close(dot(u, hv), dot(v, hu))


@pytest.mark.parametrize("name", [name for name in models.BUILDERS if name != "mlp"])
def test_channels_last_changes_only_the_layout(name):
    torch.manual_seed(0)
    arguments = SMALL[name]
    model = models.build(name, classes=5, **arguments).double().eval()
    images = torch.randn(2, arguments.get("channels", 3), *[arguments["image_size"]] * 2, dtype=torch.float64)
    expected = model(images)
    model.to(memory_format=torch.channels_last)
    torch.testing.assert_close(model(images.to(memory_format=torch.channels_last)), expected)


def test_a_wider_image_is_pooled_rather_than_refused():
    with torch.device("meta"):
        for name in ("vgg16-bn", "resnet18", "wrn28-10", "pyramidnet110"):
            model = models.build(name, classes=200, image_size=64)
            assert model(torch.empty(2, 3, 64, 64)).shape == (2, 200)


def test_vgg_takes_hidden_layers_with_dropout_before_its_head():
    with torch.device("meta"):
        plain, deep = (models.build("vgg16-bn", classes=100, hidden=hidden) for hidden in ((), (512, 512)))
    assert parameters(deep) - parameters(plain) == 2 * (512 * 512 + 512)
    assert plain.state_dict().keys() < deep.state_dict().keys()
    torch.manual_seed(0)
    model = models.build("vgg16-bn", width=2, hidden=[8, 8], dropout=0.5)
    images = torch.randn(4, 3, 32, 32)
    assert not torch.equal(model(images), model(images))
    assert torch.equal(model.eval()(images), model(images))


def test_the_seed_determines_the_initial_weights():
    torch.manual_seed(3)
    first = models.build("cnn")
    torch.manual_seed(3)
    second = models.build("cnn")
    third = models.build("cnn")
    weight = first.features[0][0].weight
    assert torch.equal(weight, second.features[0][0].weight)
    assert not torch.equal(weight, third.features[0][0].weight)


def test_bad_requests_name_the_argument():
    with pytest.raises(ValueError, match=r"model must be one of mlp, cnn, .*vit-l, got 'resnet19'"):
        models.build("resnet19")
    with pytest.raises(ValueError, match=r"Model 'resnet18': .*'widht'"):
        models.build("resnet18", widht=16)
    with pytest.raises(ValueError, match="image_size must be at least 32 for vgg16-bn"):
        models.build("vgg16-bn", image_size=16)
    with pytest.raises(ValueError, match="Model 'mlp': "):
        models.build("mlp", hidden=[-1])
    with pytest.raises(ValueError, match="patch must divide image_size"):
        models.build("vit-b", image_size=30)
    with pytest.raises(ValueError, match="depth must be 6 n"):
        models.build("pyramidnet110", depth=111)
    with pytest.raises(ValueError, match="block must be one of basic, bottleneck"):
        models.build("pyramidnet110", block="wide")
    with pytest.raises(ValueError, match="heads must divide dim"):
        models.build("vit-ti", dim=100)

"""The convolutional networks of the vision experiments, and two small networks for quick runs, examples and tests.

``width`` is always the number of channels of the first convolution. All but the MLP end with a global mean over the
pixels and a linear head.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from llqr.lab.names import check_known


def conv_norm(fan_in: int, fan_out: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """A convolution without bias that keeps the image size up to its stride, and the BatchNorm that follows it."""
    return nn.Sequential(
        nn.Conv2d(fan_in, fan_out, kernel, stride=stride, padding=kernel // 2, bias=False), nn.BatchNorm2d(fan_out)
    )


class GlobalMean(nn.Module):
    """Over the pixels of every channel."""

    def forward(self, images: Tensor) -> Tensor:
        return images.mean(dim=(2, 3))


def network(width: int, classes: int, *, hidden: nn.Module | None = None, **parts: nn.Module) -> nn.Sequential:
    """These parts one after the other, a global mean, ``hidden`` layers that end with ``width``, and a linear head.

    Convolutions start as in He et al. (2015), fan-out, with zero biases; norms and heads as PyTorch makes them.
    """
    after = {} if hidden is None else {"hidden": hidden}
    made = nn.Sequential(OrderedDict(**parts, mean=GlobalMean(), **after, head=nn.Linear(width, classes)))
    for module in made.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return made


def pre_activation(stem: nn.Module, blocks: Iterable[nn.Module], width: int, classes: int) -> nn.Sequential:
    """Of pre-activation residual blocks, so that a norm and a ReLU follow the last of them."""
    norm = nn.BatchNorm2d(width)
    return network(width, classes, stem=stem, blocks=nn.Sequential(*blocks), norm=norm, relu=nn.ReLU())


# -- small networks ----------------------------------------------------------------------------------------------------


def mlp(
    *, classes: int = 10, image_size: int = 8, channels: int = 1, hidden: Sequence[int] = (64, 64)
) -> nn.Sequential:
    """Flatten, then linear layers with ReLU between them; ``hidden`` gives the widths."""
    widths = [channels * image_size**2, *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))


def cnn(*, classes: int = 10, image_size: int = 8, channels: int = 1, width: int = 16) -> nn.Sequential:
    """Three 3x3 convolutions with BatchNorm and ReLU, halving the image twice."""
    sizes = pairwise([channels, width, 2 * width, 4 * width])
    layers = [
        nn.Sequential(*conv_norm(fan_in, fan_out, 3, stride), nn.ReLU())
        for (fan_in, fan_out), stride in zip(sizes, (1, 2, 2), strict=True)
    ]
    return network(4 * width, classes, features=nn.Sequential(*layers))


# -- VGG (Simonyan & Zisserman, 2015) ----------------------------------------------------------------------------------


def vgg16_bn(
    *,
    classes: int = 10,
    image_size: int = 32,
    channels: int = 3,
    width: int = 64,
    hidden: Sequence[int] = (),
    dropout: float = 0.0,
) -> nn.Sequential:
    """VGG16-BN in its CIFAR form: thirteen 3x3 convolutions with bias, BatchNorm and ReLU, and five 2x2 max-pools.

    The two hidden layers of width 4096 of the ImageNet network are left out, as is usual at 32 pixels; ``hidden`` adds
    layers of the widths it gives, each with ``dropout`` before and ReLU after it.
    """
    layers: list[nn.Module] = []
    for multiples in ((1, 1), (2, 2), (4, 4, 4), (8, 8, 8), (8, 8, 8)):
        for multiple in multiples:
            fan_out = multiple * width
            layers += [nn.Conv2d(channels, fan_out, 3, padding=1), nn.BatchNorm2d(fan_out), nn.ReLU()]
            channels = fan_out
        layers.append(nn.MaxPool2d(2))
    hidden_layers: list[nn.Module] = []
    for fan_out in hidden:
        hidden_layers += [nn.Dropout(dropout), nn.Linear(channels, fan_out), nn.ReLU()]
        channels = fan_out
    return network(channels, classes, features=nn.Sequential(*layers), hidden=nn.Sequential(*hidden_layers))


# -- residual networks (He et al., 2016) -------------------------------------------------------------------------------


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    expansion = 1

    def __init__(self, fan_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = conv_norm(fan_in, width, 3, stride)
        self.conv2 = conv_norm(width, width, 3)
        self.shortcut = shortcut(fan_in, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv2(F.relu(self.conv1(x))) + self.shortcut(x))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions and a shortcut; the 3x3 one is strided ("v1.5", as in torchvision)."""

    expansion = 4

    def __init__(self, fan_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = conv_norm(fan_in, width, 1)
        self.conv2 = conv_norm(width, width, 3, stride)
        self.conv3 = conv_norm(width, width * self.expansion, 1)
        self.shortcut = shortcut(fan_in, width * self.expansion, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv3(F.relu(self.conv2(F.relu(self.conv1(x))))) + self.shortcut(x))


def shortcut(fan_in: int, fan_out: int, stride: int) -> nn.Module:
    """The identity, or a strided 1x1 projection where the shape changes."""
    return nn.Identity() if stride == 1 and fan_in == fan_out else conv_norm(fan_in, fan_out, 1, stride)


def resnet(
    block: type[BasicBlock] | type[Bottleneck], depths: Sequence[int], stem: nn.Module, width: int, classes: int
) -> nn.Sequential:
    """A stem and four stages that double the width and halve the image."""
    fan_in, stages = width, []
    for stage, depth in enumerate(depths):
        blocks = []
        for position in range(depth):
            stride = 2 if stage > 0 and position == 0 else 1
            blocks.append(block(fan_in, width << stage, stride))
            fan_in = (width << stage) * block.expansion
        stages.append(nn.Sequential(*blocks))
    return network(fan_in, classes, stem=stem, stages=nn.Sequential(*stages))


def resnet18(*, classes: int = 10, image_size: int = 32, channels: int = 3, width: int = 64) -> nn.Sequential:
    """ResNet-18 in its CIFAR form, with the 3x3 stem of stride 1 used on 32 and 64 pixels."""
    stem = nn.Sequential(*conv_norm(channels, width, 3), nn.ReLU())
    return resnet(BasicBlock, (2, 2, 2, 2), stem, width, classes)


def resnet50(*, classes: int = 1000, image_size: int = 224, channels: int = 3, width: int = 64) -> nn.Sequential:
    """ResNet-50 with the 7x7 stem of stride 2 and the max-pool used on ImageNet."""
    stem = nn.Sequential(*conv_norm(channels, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1))
    return resnet(Bottleneck, (3, 4, 6, 3), stem, width, classes)


# -- wide residual networks (Zagoruyko & Komodakis, 2016) --------------------------------------------------------------


class WideBlock(nn.Module):
    """Norm, ReLU, 3x3 convolution, twice. Where the width changes, the 1x1 shortcut reads the activated input."""

    def __init__(self, fan_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(fan_in)
        self.conv1 = nn.Conv2d(fan_in, width, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.shortcut = None if fan_in == width else nn.Conv2d(fan_in, width, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        activated = F.relu(self.norm1(x))
        residual: Tensor = self.conv2(F.relu(self.norm2(self.conv1(activated))))
        return residual + (x if self.shortcut is None else self.shortcut(activated))


def wrn28_10(
    *, classes: int = 10, image_size: int = 32, channels: int = 3, depth: int = 28, widen: int = 10, width: int = 16
) -> nn.Sequential:
    """WRN-28-10: a 3x3 stem and three stages of ``(depth - 4) / 6`` blocks, ``widen`` times as wide, no dropout."""
    if depth < 10 or (depth - 4) % 6:
        raise ValueError(f"depth must be 6 n + 4 with n at least 1, got {depth}.")
    stem = nn.Conv2d(channels, width, 3, padding=1, bias=False)
    fan_in, blocks = width, []
    for stage in range(3):
        fan_out = width * widen << stage
        for position in range((depth - 4) // 6):
            blocks.append(WideBlock(fan_in, fan_out, stride=2 if stage > 0 and position == 0 else 1))
            fan_in = fan_out
    return pre_activation(stem, blocks, fan_in, classes)


# -- pyramidal residual networks (Han et al., 2017) --------------------------------------------------------------------

LAYERS_PER_BLOCK = {"basic": 2, "bottleneck": 3}


class PyramidBlock(nn.Module):
    """Norm first, no ReLU before the first convolution, a norm at the end, and a shortcut without parameters.

    The shortcut averages 2x2 pixels where the residual is strided, and pads missing channels with zeros.
    """

    def __init__(self, fan_in: int, width: int, stride: int, block: str) -> None:
        super().__init__()
        kernels, fan_out = ((3, 3), width) if block == "basic" else ((1, 3, 1), 4 * width)
        widths = [fan_in, *[width] * (len(kernels) - 1), fan_out]
        # The first 3x3 convolution is the strided one.
        strides = [stride if index == kernels.index(3) else 1 for index in range(len(kernels))]
        layers: list[nn.Module] = []
        for kernel, (before, after), own_stride in zip(kernels, pairwise(widths), strides, strict=True):
            activation = [nn.ReLU()] if layers else []
            convolution = nn.Conv2d(before, after, kernel, own_stride, padding=kernel // 2, bias=False)
            layers += [nn.BatchNorm2d(before), *activation, convolution]
        self.residual = nn.Sequential(*layers, nn.BatchNorm2d(fan_out))
        self.stride = stride
        self.new_channels = fan_out - fan_in

    def forward(self, x: Tensor) -> Tensor:
        shortcut = F.avg_pool2d(x, 2, ceil_mode=True) if self.stride == 2 else x
        residual: Tensor = self.residual(x)
        return residual + F.pad(shortcut, (0, 0, 0, 0, 0, self.new_channels))


def pyramidnet110(
    *,
    classes: int = 10,
    image_size: int = 32,
    channels: int = 3,
    depth: int = 110,
    alpha: int = 270,
    block: str = "basic",
    width: int = 16,
) -> nn.Sequential:
    """PyramidNet-110, additive: a stem and three stages, every block a little wider and the last by alpha.

    With ``"basic"`` blocks it is the network that Han et al. publish under that name: stages of 18 blocks, 28,485,477
    parameters with 10 classes. ``"bottleneck"`` gives the network of the same depth and alpha that some public SAM code
    trains under the same name: stages of 12 blocks, 18,323,787 parameters.
    """
    check_known("block", block, LAYERS_PER_BLOCK)
    per_stage, rest = divmod(depth - 2, 3 * LAYERS_PER_BLOCK[block])
    if rest or per_stage < 1:
        raise ValueError(f"depth must be {3 * LAYERS_PER_BLOCK[block]} n + 2 for {block} blocks, got {depth}.")
    fan_in, blocks = width, []
    stem = conv_norm(channels, width, 3)
    for index in range(3 * per_stage):
        planes = round(width + alpha * (index + 1) / (3 * per_stage))
        stride = 2 if index in (per_stage, 2 * per_stage) else 1
        blocks.append(PyramidBlock(fan_in, planes, stride, block))
        fan_in = planes if block == "basic" else 4 * planes
    return pre_activation(stem, blocks, fan_in, classes)

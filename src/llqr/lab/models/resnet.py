"""Residual networks (He et al., 2016): ResNet-18 in its CIFAR form and ResNet-50 in its ImageNet form."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from llqr.lab.models.convolutional import conv_norm, network
from llqr.lab.models.sizes import check_sizes


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
    """A stem, four stages that double the width and halve the image, a global mean and a linear head."""
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
    """ResNet-18 with the 3x3 stem of stride 1 used on 32 and 64 pixels; ``width`` is that of the first stage."""
    check_sizes(classes=classes, image_size=image_size, channels=channels, width=width)
    if image_size < 8:
        raise ValueError(f"image_size must be at least 8 for resnet18, which halves it three times, got {image_size}.")
    stem = nn.Sequential(*conv_norm(channels, width, 3), nn.ReLU())
    return resnet(BasicBlock, (2, 2, 2, 2), stem, width, classes)


def resnet50(*, classes: int = 1000, image_size: int = 224, channels: int = 3, width: int = 64) -> nn.Sequential:
    """ResNet-50 with the 7x7 stem of stride 2 and the max-pool used on ImageNet."""
    check_sizes(classes=classes, image_size=image_size, channels=channels, width=width)
    if image_size < 32:
        raise ValueError(f"image_size must be at least 32 for resnet50, which halves it five times, got {image_size}.")
    stem = nn.Sequential(*conv_norm(channels, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1))
    return resnet(Bottleneck, (3, 4, 6, 3), stem, width, classes)

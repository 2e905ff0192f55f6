"""VGG16 with BatchNorm (Simonyan & Zisserman, 2015) in its CIFAR form: thirteen convolutions and one linear head.

The two hidden layers of width 4096 before the head of the ImageNet network are left out, as is usual at 32 pixels;
``hidden`` adds layers of the widths it gives. Convolutions keep their biases.
"""

from collections.abc import Sequence

from torch import nn

from llqr.lab.models.convolutional import network
from llqr.lab.models.sizes import check_hidden, check_sizes

# Multiples of the first width, stage by stage.
STAGES = ((1, 1), (2, 2), (4, 4, 4), (8, 8, 8), (8, 8, 8))


def vgg16_bn(
    *,
    classes: int = 10,
    image_size: int = 32,
    channels: int = 3,
    width: int = 64,
    hidden: Sequence[int] = (),
    dropout: float = 0.0,
) -> nn.Sequential:
    """VGG16-BN: stages of 3x3 convolutions, each followed by BatchNorm and ReLU and closed by a 2x2 max-pool.

    Then a global mean, the hidden layers, each with dropout before and ReLU after it, and a linear head. ``width`` is
    that of the first stage.
    """
    check_sizes(classes=classes, image_size=image_size, channels=channels, width=width)
    check_hidden(hidden)
    if image_size < 32:
        raise ValueError(f"image_size must be at least 32 for vgg16-bn, which halves it five times, got {image_size}.")
    if not 0 <= dropout < 1 or (dropout and not hidden):
        raise ValueError(f"dropout must lie in [0, 1) and needs hidden layers, got {dropout} with {list(hidden)}.")
    layers: list[nn.Module] = []
    for stage in STAGES:
        for multiple in stage:
            fan_out = multiple * width
            layers += [nn.Conv2d(channels, fan_out, 3, padding=1), nn.BatchNorm2d(fan_out), nn.ReLU()]
            channels = fan_out
        layers.append(nn.MaxPool2d(2))
    hidden_layers: list[nn.Module] = []
    for fan_out in hidden:
        hidden_layers += [nn.Dropout(dropout), nn.Linear(channels, fan_out), nn.ReLU()]
        channels = fan_out
    return network(channels, classes, features=nn.Sequential(*layers), hidden=nn.Sequential(*hidden_layers))

"""Two small networks for quick runs, examples and tests: an MLP and a CNN."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from llqr.lab.models.convolutional import conv_norm, network
from llqr.lab.models.sizes import check_hidden, check_sizes


def mlp(
    *, classes: int = 10, image_size: int = 8, channels: int = 1, hidden: Sequence[int] = (64, 64)
) -> nn.Sequential:
    """Flatten, then linear layers with ReLU between them; ``hidden`` gives the widths."""
    check_sizes(classes=classes, image_size=image_size, channels=channels)
    check_hidden(hidden)
    widths = [channels * image_size**2, *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))


def cnn(*, classes: int = 10, image_size: int = 8, channels: int = 1, width: int = 16) -> nn.Sequential:
    """Three 3x3 convolutions with BatchNorm and ReLU, halving the image twice, a global mean and a linear head.

    ``width`` is the number of channels of the first convolution.
    """
    check_sizes(classes=classes, image_size=image_size, channels=channels, width=width)
    if image_size < 4:
        raise ValueError(f"image_size must be at least 4 for cnn, which halves it twice, got {image_size}.")
    sizes = pairwise([channels, width, 2 * width, 4 * width])
    layers = [
        nn.Sequential(*conv_norm(fan_in, fan_out, 3, stride), nn.ReLU())
        for (fan_in, fan_out), stride in zip(sizes, (1, 2, 2), strict=True)
    ]
    return network(4 * width, classes, features=nn.Sequential(*layers))

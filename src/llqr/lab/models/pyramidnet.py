"""Pyramidal residual networks (Han et al., 2017), additive: every block is slightly wider than the one before it.

PyramidNet-110 with alpha = 270 is the network that Han et al. publish under that name: 3 stages of 18 *basic* blocks,
widths growing from 16 by 5 per block to 286, 28,485,477 parameters with 10 classes. ``block="bottleneck"`` gives the
network of the same depth and alpha that some public SAM code trains under the same name: 3 stages of 12 bottlenecks,
widths growing by 7.5 per block and multiplied by 4 at the output, 18,323,787 parameters.
"""

from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from llqr.lab.models.convolutional import conv_norm, pre_activation
from llqr.lab.models.sizes import check_sizes
from llqr.lab.names import check_known

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
    """PyramidNet-110, alpha = 270: a 3x3 stem with BatchNorm, three stages, norm, ReLU, global mean and linear head.

    ``width`` is that of the stem, and the last block is alpha wider.
    """
    check_sizes(classes=classes, image_size=image_size, channels=channels, depth=depth, width=width)
    if alpha < 0:
        raise ValueError(f"alpha must not be negative, got {alpha}.")
    if image_size < 4:
        raise ValueError(f"image_size must be at least 4 for pyramidnet110, which halves it twice, got {image_size}.")
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

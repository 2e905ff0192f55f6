"""Wide residual networks (Zagoruyko & Komodakis, 2016): pre-activation basic blocks, no dropout."""

from torch import Tensor, nn
from torch.nn import functional as F

from llqr.lab.models.convolutional import pre_activation
from llqr.lab.models.sizes import check_sizes


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
    """WRN-28-10: a 3x3 stem, three stages of ``(depth - 4) / 6`` blocks, norm, ReLU, global mean and linear head.

    ``width`` is that of the stem, which the stages multiply by ``widen``.
    """
    check_sizes(classes=classes, image_size=image_size, channels=channels, depth=depth, widen=widen, width=width)
    if image_size < 4:
        raise ValueError(f"image_size must be at least 4 for wrn28-10, which halves it twice, got {image_size}.")
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

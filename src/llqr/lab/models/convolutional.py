"""What the convolutional networks are made of: a convolution with BatchNorm, and the frame around all blocks."""

from collections import OrderedDict
from collections.abc import Iterable

from torch import Tensor, nn


def conv_norm(fan_in: int, fan_out: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """A convolution without bias that keeps the image size up to its stride, and the BatchNorm that follows it."""
    return nn.Sequential(
        nn.Conv2d(fan_in, fan_out, kernel, stride=stride, padding=kernel // 2, bias=False), nn.BatchNorm2d(fan_out)
    )


def he_normal(model: nn.Module) -> None:
    """He et al. (2015), fan-out, for every convolution; zero biases. Norms and heads keep PyTorch's defaults."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)


class GlobalMean(nn.Module):
    """Over the pixels of every channel."""

    def forward(self, images: Tensor) -> Tensor:
        return images.mean(dim=(2, 3))


def network(width: int, classes: int, *, hidden: nn.Module | None = None, **parts: nn.Module) -> nn.Sequential:
    """These parts one after the other, a global mean, ``hidden`` layers that end with ``width``, and a linear head."""
    after = {} if hidden is None else {"hidden": hidden}
    made = nn.Sequential(OrderedDict(**parts, mean=GlobalMean(), **after, head=nn.Linear(width, classes)))
    he_normal(made)
    return made


def pre_activation(stem: nn.Module, blocks: Iterable[nn.Module], width: int, classes: int) -> nn.Sequential:
    """Of pre-activation residual blocks, so that a norm and a ReLU follow the last of them."""
    norm = nn.BatchNorm2d(width)
    return network(width, classes, stem=stem, blocks=nn.Sequential(*blocks), norm=norm, relu=nn.ReLU())

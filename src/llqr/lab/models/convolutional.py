"""What the convolutional networks are made of: a convolution with BatchNorm, and the frame around all blocks."""

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


class ConvolutionalNetwork(nn.Module):
    """Its ``parts`` one after the other, the last of them with ``width`` channels; a global mean and a linear head."""

    def __init__(self, width: int, classes: int, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.head = nn.Linear(width, classes)
        he_normal(self)

    def forward(self, images: Tensor) -> Tensor:
        *parts, head = self.children()
        for part in parts:
            images = part(images)
        logits: Tensor = head(images.mean(dim=(2, 3)))
        return logits


def pre_activation(stem: nn.Module, blocks: Iterable[nn.Module], width: int, classes: int) -> ConvolutionalNetwork:
    """Of pre-activation residual blocks, so that a norm and a ReLU follow the last of them."""
    norm = nn.BatchNorm2d(width)
    return ConvolutionalNetwork(width, classes, stem=stem, blocks=nn.Sequential(*blocks), norm=norm, relu=nn.ReLU())

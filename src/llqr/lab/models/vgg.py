"""VGG16 with BatchNorm (Simonyan & Zisserman, 2015) in its CIFAR form: thirteen convolutions and one linear head.

The two hidden layers of width 4096 before the head of the ImageNet network are left out, as is usual at 32 pixels;
convolutions keep their biases.
"""

from torch import Tensor, nn

from llqr.lab.models.initialise import he_normal

# Multiples of the first width, stage by stage.
STAGES = ((1, 1), (2, 2), (4, 4, 4), (8, 8, 8), (8, 8, 8))


class Vgg(nn.Module):
    """Stages of 3x3 convolutions, each followed by BatchNorm and ReLU and closed by a 2x2 max-pool."""

    def __init__(self, classes: int, channels: int, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for stage in STAGES:
            for multiple in stage:
                fan_out = multiple * width
                layers += [nn.Conv2d(channels, fan_out, 3, padding=1), nn.BatchNorm2d(fan_out), nn.ReLU()]
                channels = fan_out
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(channels, classes)
        he_normal(self)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(images).mean(dim=(2, 3)))
        return logits


def vgg16_bn(*, classes: int = 10, image_size: int = 32, channels: int = 3, width: int = 64) -> Vgg:
    """VGG16-BN; ``width`` is that of the first stage."""
    if image_size < 32:
        raise ValueError(f"image_size must be at least 32 for vgg16-bn, which halves it five times, got {image_size}.")
    return Vgg(classes, channels, width)

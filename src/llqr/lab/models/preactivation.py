"""The frame of the pre-activation residual networks: stem, blocks, norm, ReLU, global mean and linear head."""

from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn import functional as F

from llqr.lab.models.initialise import he_normal


class PreActivationNetwork(nn.Module):
    """``width`` is the number of channels after the last block."""

    def __init__(self, stem: nn.Module, blocks: Iterable[nn.Module], width: int, classes: int) -> None:
        super().__init__()
        self.stem = stem
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.BatchNorm2d(width)
        self.head = nn.Linear(width, classes)
        he_normal(self)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(F.relu(self.norm(self.blocks(self.stem(images)))).mean(dim=(2, 3)))
        return logits

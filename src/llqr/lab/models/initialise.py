"""The initial weights of the convolutional networks."""

from torch import nn


def he_normal(model: nn.Module) -> None:
    """He et al. (2015), fan-out, for every convolution; zero biases. Norms and heads keep PyTorch's defaults."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)

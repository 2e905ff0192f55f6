"""The networks of the paper's vision experiments and two small ones, by name.

>>> from llqr.lab import models
>>> model = models.build("resnet18", classes=100, image_size=32, channels=3)

Under ``torch.device("meta")`` a model is built without memory, which is how sizes are estimated before a run.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from llqr.lab.models.convolutional import cnn, mlp, pyramidnet110, resnet18, resnet50, vgg16_bn, wrn28_10
from llqr.lab.models.vit import vit_b, vit_l, vit_s, vit_ti
from llqr.lab.names import check_known

__all__ = ["BUILDERS", "build", "construct"]

BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    "vgg16-bn": vgg16_bn,
    "resnet18": resnet18,
    "wrn28-10": wrn28_10,
    "pyramidnet110": pyramidnet110,
    "resnet50": resnet50,
    "vit-ti": vit_ti,
    "vit-s": vit_s,
    "vit-b": vit_b,
    "vit-l": vit_l,
}
SMALLEST_IMAGE = {"cnn": 4, "vgg16-bn": 32, "resnet18": 8, "wrn28-10": 4, "pyramidnet110": 4, "resnet50": 32}
"""The side of the smallest image that a network can halve as often as it does."""


def build(name: str, **arguments: Any) -> nn.Module:
    """The network ``name``.

    Every network takes ``classes``, ``image_size`` and ``channels``, with the defaults of the data set it was published
    for; other options depend on the network (``width``, ``hidden``, ``patch``, ...). The random initial
    weights come from PyTorch's global generator.
    """
    smallest = SMALLEST_IMAGE.get(name, 1)
    if arguments.get("image_size", smallest) < smallest:
        raise ValueError(f"image_size must be at least {smallest} for {name}, got {arguments['image_size']}.")
    return construct(BUILDERS, name, arguments)


def construct(builders: Mapping[str, Callable[..., nn.Module]], name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """One of ``builders`` called with ``arguments``; a `ValueError` names the network if it cannot be."""
    check_known("model", name, builders)
    try:
        return builders[name](**arguments)
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"Model {name!r}: {error}") from error

"""The networks of the paper's vision experiments and two small ones, by name.

>>> from llqr.lab import models
>>> model = models.build("resnet18", classes=100, image_size=32, channels=3)

Under ``torch.device("meta")`` a model is built without memory, which is how sizes are estimated before a run.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from llqr.lab.models.pyramidnet import pyramidnet110
from llqr.lab.models.resnet import resnet18, resnet50
from llqr.lab.models.small import cnn, mlp
from llqr.lab.models.vgg import vgg16_bn
from llqr.lab.models.vit import vit_b, vit_l, vit_s, vit_ti
from llqr.lab.models.wideresnet import wrn28_10
from llqr.lab.names import check_known

__all__ = ["build", "names"]

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


def names() -> list[str]:
    """The names that `build` accepts."""
    return list(BUILDERS)


def build(name: str, **arguments: Any) -> nn.Module:
    """The network ``name``.

    Every network takes ``classes``, ``image_size`` and ``channels``, with the defaults of the data set it was published
    for; other options depend on the network (``width``, ``hidden``, ``patch``, ``fused``, ...). The random initial
    weights come from PyTorch's global generator.
    """
    check_known("model", name, BUILDERS)
    try:
        return BUILDERS[name](**arguments)
    except TypeError as error:  # an option that this network does not have
        raise TypeError(f"Model {name!r}: {error}.") from error

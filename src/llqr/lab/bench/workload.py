"""What is timed: a network of the laboratory on random images, and the forward and backward pass of a step."""

import gc
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from llqr.lab import models
from llqr.lab.config.strict import ConfigurationError
from llqr.lab.training.captured_pass import CapturedPass, Pass
from llqr.lab.training.compiling import compile_network
from llqr.lab.training.precision import Precision

IMAGENET = {"image_size": 224, "classes": 1000}
CIFAR = {"image_size": 32, "classes": 100}
CHANNELS = 3


@dataclass(frozen=True)
class Network:
    """A network by name, at the image size and number of classes it is published for unless ``options`` say otherwise.

    Written ``vit-b``, ``ViT-B/16`` (the patch after the slash) or ``resnet18:width=16,classes=10``.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Self:
        head, _, listed = text.partition(":")
        name, slash, patch = head.strip().lower().partition("/")
        options: dict[str, Any] = {"patch": _value(patch)} if slash else {}
        for entry in filter(None, listed.split(",")):
            key, equals, value = entry.partition("=")
            if not equals:
                raise ConfigurationError(f"--model {text}: {entry!r} must be written key=value.")
            options[key.strip()] = _value(value.strip())
        if name not in models.names():
            raise ConfigurationError(f"--model must be one of {', '.join(models.names())}, got {name!r}.")
        return cls(name, options)

    @property
    def label(self) -> str:
        listed = ",".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.name}:{listed}" if listed else self.name

    @property
    def arguments(self) -> dict[str, Any]:
        published = IMAGENET if self.name.startswith("vit") or self.name == "resnet50" else CIFAR
        return published | {"channels": CHANNELS} | self.options

    def build(self) -> nn.Module:
        try:
            return models.build(self.name, **self.arguments)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"--model {self.label}: {error}") from error


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


class Classification:
    """How scores and their loss come about, for the passes of a step."""

    def forward(self, model: nn.Module, images: Tensor) -> Tensor:
        return model(images)

    def loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(scores.float() if scores.dtype.itemsize < 4 else scores, labels)


@dataclass(frozen=True)
class Passes:
    """How the forward and backward pass of a step is run: recorded as a CUDA graph, through `torch.compile`."""

    capture: bool = False
    compile: bool = False

    def __str__(self) -> str:
        words = [word for word, used in (("compiled", self.compile), ("captured", self.capture)) if used]
        return ", ".join(words) or "eager"


class Workload:
    """A network in training mode with one batch of random images; the same weights and images every time it is made."""

    def __init__(self, network: Network, batch: int, precision: Precision, passes: Passes | None = None) -> None:
        self.network, self.precision = network, precision
        self.passes = passes or Passes()
        device, arguments = precision.device, network.arguments
        precision.set_up()
        if device.type == "cuda":
            gc.collect()  # geometries and closures hold each other, and with them the memory of the workload before
        torch.manual_seed(0)
        with device:
            model = network.build()
            images = torch.randn(batch, arguments["channels"], arguments["image_size"], arguments["image_size"])
            labels = torch.randint(arguments["classes"], (batch,))
        # As the recipes of the vision tables do.
        self.model = model.to(memory_format=torch.channels_last).train()
        self.batch = images.contiguous(memory_format=torch.channels_last), labels
        # Now and not at the first pass: a refresh runs through blocks that are compiled in place, and may come before.
        self._passing = compile_network(self.model) if self.passes.compile else self.model
        self._pass: Pass | None = None

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def closure(self, optimizer: torch.optim.Optimizer) -> Callable[[], Tensor]:
        """Loss and gradients of the batch, for one of several optimizers of this network."""
        run_pass = self._made_pass()
        if self.passes.capture:  # a recorded pass writes gradients where they are; to drop them would lose that memory
            return run_pass

        def closure() -> Tensor:
            optimizer.zero_grad()
            return run_pass()

        return closure

    def _made_pass(self) -> Pass:
        """One for all optimizers, because a recorded pass keeps the memory of its activations."""
        if self._pass is None:
            form = CapturedPass if self.passes.capture else Pass
            self._pass = form(Classification(), self._passing, self.precision)
            self._pass.load(self.batch)
        return self._pass

"""What is timed: a network of the laboratory on random images, its forward and backward pass, and a step by method."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import llqr
from llqr.curvature.batch import call_model
from llqr.lab import models
from llqr.lab.bench.timing import Clock
from llqr.lab.config.layers import parse_value
from llqr.lab.config.settings import Base
from llqr.lab.errors import ConfigurationError
from llqr.lab.names import check_known
from llqr.lab.passes import CapturedPass, Pass, Precision, compile_network

IMAGENET = {"image_size": 224, "classes": 1000, "channels": 3}
CIFAR = {"image_size": 32, "classes": 100, "channels": 3}
# Small learning rates, so that the weights stay finite however many steps are timed.
SGD = Base("sgd", lr=1e-4, weight_decay=5e-4, momentum=0.9)
BASES = {"SGD": SGD, "AdamW": Base("adamw", lr=1e-5, weight_decay=5e-4)}
METHODS = (*BASES, "SAM", "F-SAM", "LLQR", "LLQR+SAM")
"""As the paper's tables call them."""


@dataclass(frozen=True)
class Network:
    """A network by name, at the image size and number of classes it is published for unless ``options`` set others.

    Written ``vit-b`` or ``resnet18:width=16,classes=10``.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Self:
        name, _, listed = text.partition(":")
        options: dict[str, Any] = {}
        for entry in filter(None, listed.split(",")):
            key, equals, value = entry.partition("=")
            if not equals:
                raise ConfigurationError(f"--model {text}: {entry!r} must be written key=value.")
            options[key.strip()] = parse_value(value)
        check_known("--model", name, models.BUILDERS)
        return cls(name, options)

    @property
    def label(self) -> str:
        listed = ",".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.name}:{listed}" if listed else self.name

    @property
    def arguments(self) -> dict[str, Any]:
        published = IMAGENET if self.name.startswith("vit") or self.name == "resnet50" else CIFAR
        return published | self.options

    def build(self) -> nn.Module:
        try:
            return models.build(self.name, **self.arguments)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"--model {self.label}: {error}") from error


def cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """The mean loss, in at least float32."""
    return F.cross_entropy(scores.float() if scores.dtype.itemsize < 4 else scores, labels)


CLASSIFICATION: Any = SimpleNamespace(forward=call_model, loss=cross_entropy)
"""The part of a task that the pass of a step needs."""


@dataclass(frozen=True)
class PassOptions:
    """How the forward and backward pass of a step is run: captured as a CUDA graph, through `torch.compile`."""

    capture: bool = False
    compile: bool = False


class Workload:
    """A network in training mode and one batch of random images; the same weights and images every time it is made."""

    def __init__(self, network: Network, batch: int, precision: Precision, passes: PassOptions = PassOptions()) -> None:
        self.network, self.precision, self.passes = network, precision, passes
        self.clock = Clock(precision.device)
        device, arguments = precision.device, network.arguments
        precision.set_up()
        if device.type == "cuda":
            gc.collect()  # geometries and closures refer to each other, and keep the memory of the last workload
        torch.manual_seed(0)
        with device:
            model = network.build()
            images = torch.randn(batch, arguments["channels"], arguments["image_size"], arguments["image_size"])
            labels = torch.randint(arguments["classes"], (batch,))
        # As the recipes of the vision tables do.
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's annotations
        self.model = model.train()
        self.batch = images.contiguous(memory_format=torch.channels_last), labels
        # Before the first pass: a refresh runs through blocks that are compiled in place, and may come earlier.
        self._network_of_passes = compile_network(self.model) if passes.compile else self.model

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @cached_property
    def closure(self) -> Pass:
        """Loss and gradients of the batch, for all optimizers: a captured pass keeps the memory of its activations."""
        form = CapturedPass if self.passes.capture else Pass
        made = form(CLASSIFICATION, self._network_of_passes, self.precision)
        made.load(self.batch)
        return made


@dataclass(frozen=True)
class Setup:
    """What every command measures: networks, in batches of one size, in one precision."""

    networks: Sequence[Network]
    batch: int
    precision: Precision

    def workload(self, network: Network, passes: PassOptions = PassOptions()) -> Workload:
        return Workload(network, self.batch, self.precision, passes)

    @property
    def on_cuda(self) -> bool:
        return self.precision.device.type == "cuda"

    def to_dict(self) -> dict[str, Any]:
        models = [network.label for network in self.networks]
        return {"models": models, "batch": self.batch, "precision": self.precision.name}


def learns_metric(method: str) -> bool:
    return method.startswith("LLQR")


def step_of(method: str, workload: Workload, geometry: llqr.Geometry | None = None) -> Callable[[], object]:
    """One step of a method on the workload's batch; its time does not depend on the weights or on what `U` learned."""
    closure = workload.closure
    if method in BASES:
        plain = BASES[method].build(workload.model)
        return lambda: (closure(), plain.step())
    make = {"LLQR": llqr.Optimizer, "F-SAM": llqr.FriendlySAM}.get(method, llqr.SAM)
    own = geometry if learns_metric(method) else None
    radius: dict[str, Any] = {"rho": 0.05} if "SAM" in method else {}
    optimizer = make(SGD.build(workload.model), geometry=own, model=workload.model, **radius)
    return lambda: optimizer.step(closure, batch=workload.batch)

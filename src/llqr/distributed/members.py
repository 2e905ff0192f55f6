"""The parameters that `U` acts on: whether they are still the model's, where they were, and moved by an optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet

from torch import Tensor, nn

from llqr.caller_warnings import warn
from llqr.distributed.dtensors import drop_gathered
from llqr.metric import Block, Metric
from llqr.report import RefreshWarning

#: A warning gives the first names of many: a backbone has hundreds of parameters.
NAMED = 5


class Members:
    """What a geometry was made for, held against what the model and the optimizers have now.

    Attributes:
        names: of every parameter that `U` acts on.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, Tensor], metric: Metric) -> None:
        self.names = {parameter: name for name, parameter in parameters.items()}
        self._model, self._parameters, self._metric = model, parameters, metric
        self._shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self._claimed: set[str] = set()
        self._announced: set[str] = set()

    def claim(self, parameters: Iterable[Tensor]) -> None:
        """An optimizer moves these."""
        self._claimed |= {self.names[parameter] for parameter in parameters if parameter in self.names}

    def check(self) -> None:
        """Refuse a model whose parameters are other tensors; name those that have joined, left, or do not move."""
        drop_gathered(self._model.modules())
        now = dict(self._model.named_parameters())
        for name, parameter in self._parameters.items():
            if now.get(name) is not parameter:
                raise RuntimeError(
                    f"model: {name!r} is another tensor than when the geometry was made (load_state_dict with "
                    "assign=True, or a wrapper, replaces them); make the geometry after that"
                )
            if parameter.shape != self._shapes[name]:
                raise RuntimeError(
                    f"model: {name!r} had the shape {tuple(self._shapes[name])} when the geometry was made, and has "
                    f"{tuple(parameter.shape)} now; make a new geometry"
                )
        moving = {name for name, parameter in now.items() if parameter.requires_grad}
        self._announce(
            moving - self._parameters.keys(),
            "did not require a gradient when the geometry was made and keep U = 1; make a new geometry to let them "
            "join",
        )
        self._announce(
            self._parameters.keys() - moving,
            "no longer require a gradient, and U is learned as if they still moved; make a new geometry without them",
        )
        if self._claimed:  # otherwise it is refreshed by hand, and nothing is known of optimizers
            self._announce(
                self._metric.whole.learnable() - self._claimed,
                "are moved by no optimizer with this geometry, but U is learned and stored for them; freeze them "
                "(requires_grad_(False)) before the geometry is made, or pass structure={PATTERN: 'identity', ...}",
            )

        self._check_place()

    def _check_place(self) -> None:
        """The factors live where the parameters were; until there are any, they follow these to another device.

        Accelerate moves a model after the optimizer was made.
        """
        metric, places = self._metric, {parameter.device for parameter in self._parameters.values()}
        moved = len(places) == 1 and {block.device for block in metric.blocks} != places
        if moved and not metric.learned and metric.whole is metric:
            metric.move_to(places.pop())
        for block in metric.whole.blocks:
            if not self.in_place(block):
                parameter = self._parameters[block.parameter]
                raise RuntimeError(
                    f"model: {block.parameter!r} moved from {block.device}, {block.dtype} to {parameter.device}, "
                    f"{parameter.dtype}; make the geometry after moving the model"
                )

    def in_place(self, block: Block) -> bool:
        """Whether the block's parameter is where it was, and what it was."""
        parameter = self._parameters[block.parameter]
        return (parameter.device, parameter.dtype) == (block.device, block.dtype)

    def _announce(self, names: AbstractSet[str], what: str) -> None:
        """Warn once about each of these parameters."""
        new = sorted(names - self._announced)
        if new:
            self._announced.update(new)
            more = f" and {len(new) - NAMED} more" if len(new) > NAMED else ""
            warn(f"model: {', '.join(new[:NAMED])}{more} {what}", RefreshWarning)

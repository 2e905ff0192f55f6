"""Batches of windows of one long sequence of tokens, made on the device.

A batch is ``(inputs, targets)``, int64 of shape (rows, context); ``targets`` is ``inputs`` one token later.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from llqr.lab.data.batches import Batches
from llqr.lab.errors import ConfigurationError
from llqr.lab.text.subwords import PAD


class WindowBatches(Batches):
    """Windows that do not overlap; all batches have one shape.

    With a seed, for training: every epoch starts at a new offset, visits its windows in random order and fills up the
    last batch with windows of the same epoch. Without, for evaluation: every token but the first is a target once, and
    the rest of the last batch is padding, which the loss ignores.

    A batch has ``rows`` windows of ``context`` tokens. Offsets and orders are drawn on the CPU, so that every device
    sees the same batches.
    """

    def __init__(
        self, tokens: Tensor, rows: int, context: int, *, seed: int | None = None, device: torch.device | str = "cpu"
    ) -> None:
        shuffle = seed is not None
        shortest = 2 * context if shuffle else 2
        if len(tokens) < shortest:
            raise ConfigurationError(
                f"tokens must be at least {shortest} for a context of {context}, got {len(tokens)}; choose a smaller "
                "data.options.context."
            )
        # Whatever the offset, this many windows have a target for every token.
        count = len(tokens) // context - 1 if shuffle else -(-(len(tokens) - 1) // context)
        super().__init__(count, rows, seed=seed, last="fill" if shuffle else "keep")
        self.context, self.device = context, torch.device(device)
        self._length = len(tokens)
        padding = torch.full((context + 1,), PAD, dtype=torch.int32)
        self._tokens = torch.cat([tokens.to(torch.int32), padding]).to(self.device)
        self._columns = torch.arange(context + 1, device=self.device)
        self._offset = 0

    def _draw(self, total: int) -> None:
        self._offset = int(torch.randint(self.context, (), generator=self.generator))

    def _produce(self, order: Tensor, first: int) -> Iterator[tuple[Tensor, Tensor]]:
        starts = self._offset + order * self.context
        # Missing windows start behind the tokens, where there is only padding.
        missing = self.steps * self.batch_size - len(starts)
        starts = torch.cat([starts, starts.new_full((missing,), self._length)]).to(self.device)
        for step in range(first, self.steps):
            part = starts[step * self.batch_size : (step + 1) * self.batch_size]
            windows = self._tokens[part[:, None] + self._columns].long()
            yield windows[:, :-1], windows[:, 1:]

    def _described(self) -> dict[str, Any]:
        return {"context": self.context} | super()._described()

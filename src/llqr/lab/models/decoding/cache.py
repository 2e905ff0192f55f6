"""The keys and values of every layer's self-attention for the tokens that a decoder has read."""

from torch import Tensor


class Cache:
    """Keys and values of up to ``length`` tokens of every hypothesis, in one block of memory.

    It is allocated at the first token, in the dtype and on the device of that token's keys. The number of tokens it
    holds is kept on the host, so that reading it never waits for the device.
    """

    def __init__(self, layers: int, length: int) -> None:
        self.layers = layers
        self.length = length
        self.held = 0
        self._memory: Tensor | None = None  # (layers, keys and values, hypotheses, heads, length, width of a head)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add one token's ``(hypotheses, heads, 1, width)``; returns the keys and values of all tokens so far."""
        if self._memory is None:
            rows, heads, _, width = keys.shape
            self._memory = keys.new_empty(self.layers, 2, rows, heads, self.length, width)
        own = self._memory[layer]
        own[0, :, :, self.held] = keys.squeeze(2)
        own[1, :, :, self.held] = values.squeeze(2)
        known = own[:, :, :, : self.held + 1]
        return known[0], known[1]

    def advance(self) -> None:
        """Count the token, after every layer has appended it."""
        self.held += 1

    def reorder(self, rows: Tensor) -> None:
        """Hypothesis ``i`` continues what was hypothesis ``rows[i]``."""
        if self._memory is not None:
            known = self._memory[:, :, :, :, : self.held]
            known.copy_(known.index_select(2, rows))

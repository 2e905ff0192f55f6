"""The sublayers of the token transformers: attention, the feed-forward network, and the residual connection."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from llqr.lab.names import check_known

NORMS = ("post", "pre")


class Attention(nn.Module):
    """Multi-head attention with separate projections for queries, keys and values: a metric sees four plain matrices.

    Tensors are ``(batch, heads, tokens, head width)`` after projection.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"heads must divide width, got heads={heads} and width={width}.")
        self.heads = heads
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def queries(self, x: Tensor) -> Tensor:
        return self._by_head(self.q(x))

    def keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._by_head(self.k(x)), self._by_head(self.v(x))

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, *, mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        """The attention output, ``(batch, tokens, width)``; only places where ``mask`` is true are attended to."""
        mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, is_causal=causal)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out

    def forward(self, x: Tensor, *, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        return self.attend(self.queries(x), *self.keys_and_values(x), mask=mask, causal=causal)

    def _by_head(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return heads


class FeedForward(nn.Module):
    """The network applied to every token: expand, activate, contract."""

    def __init__(self, width: int, hidden: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.expand = nn.Linear(width, hidden)
        self.contract = nn.Linear(hidden, width)
        self._activation = activation

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.contract(self._activation(self.expand(x)))
        return out


class Residual(nn.Module):
    """``norm(x + dropout(f(x)))`` for post-norm, ``x + dropout(f(norm(x)))`` for pre-norm."""

    def __init__(self, width: int, dropout: float, norm: str) -> None:
        super().__init__()
        check_known("norm", norm, NORMS)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self._norm_first = norm == "pre"

    def forward(self, x: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
        out: Tensor = x + self.dropout(f(self.norm(x))) if self._norm_first else self.norm(x + self.dropout(f(x)))
        return out


class SelfAttentionLayer(nn.Module):
    """Self-attention, then the feed-forward network."""

    def __init__(
        self, width: int, hidden: int, heads: int, dropout: float, norm: str, activation: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.feed_forward = FeedForward(width, hidden, activation)
        self.around_attention = Residual(width, dropout, norm)
        self.around_feed_forward = Residual(width, dropout, norm)

    def forward(self, x: Tensor, *, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        x = self.around_attention(x, lambda y: self.attention(y, mask=mask, causal=causal))
        x = self.around_feed_forward(x, self.feed_forward)
        return x


def differentiable_forward(model: nn.Module, inputs: Any) -> Tensor:
    """``model(inputs)`` with all derivatives: a `forward` for `llqr.Geometry` that gives exact products.

    Attention is PyTorch's own composition of elementary operations; the fused kernels have no forward mode and no
    double backward, so that otherwise curvature products need finite differences.
    """
    with sdpa_kernel(SDPBackend.MATH):
        out: Tensor = model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)
        return out

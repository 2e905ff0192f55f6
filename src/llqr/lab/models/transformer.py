"""fairseq's ``transformer_iwslt_de_en`` (Ott et al., 2019), for translation.

It has 6 + 6 layers of width 512, feed-forward networks of width 1024, 4 heads,
sinusoidal positions, embeddings multiplied by ``sqrt(width)``, and dropout on embeddings and on every residual branch.
Source rows may be padded on either side, rows of previous target tokens on the right. Whole rows may be padding: their
logits are finite, and a loss that ignores their targets sends no gradient through them.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from llqr.curvature.batch import call_model
from llqr.lab.names import check_known
from llqr.lab.text.subwords import PAD

NORMS = ("post", "pre")
TIES = ("decoder", "all", "none")
Known = tuple[Tensor, Tensor]
"""Keys and values ``(rows, heads, tokens, width)``."""


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
    """The network applied to every token: expand, rectify, contract."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.expand = nn.Linear(width, hidden)
        self.contract = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.contract(F.relu(self.expand(x)))
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


class EncoderLayer(nn.Module):
    """Self-attention, then the feed-forward network."""

    def __init__(self, width: int, hidden: int, heads: int, dropout: float, norm: str) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.feed_forward = FeedForward(width, hidden)
        self.around_attention = Residual(width, dropout, norm)
        self.around_feed_forward = Residual(width, dropout, norm)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.around_attention(x, lambda y: self.attention(y, mask=mask))
        x = self.around_feed_forward(x, self.feed_forward)
        return x


def differentiable_forward(model: nn.Module, inputs: Any) -> Any:
    """``model(inputs)`` with all derivatives: a `forward` for `llqr.Geometry` that gives exact products.

    Attention is PyTorch's own composition of elementary operations; the fused kernels have no forward mode and no
    double backward, so that otherwise curvature products need finite differences.
    """
    with sdpa_kernel(SDPBackend.MATH):
        return call_model(model, inputs)


class Memory(NamedTuple):
    """The encoded sources: keys and values for each layer of the decoder, and the mask of places it may attend to."""

    keys_and_values: list[Known]
    mask: Tensor


class SinusoidalPositions(nn.Module):
    """Sines, then cosines, of geometrically spaced frequencies from 1 to 1/10000; positions count from 1."""

    table: Tensor

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        if width < 4 or width % 2:
            raise ValueError(f"width must be even and at least 4, got {width}.")
        frequencies = torch.exp(torch.arange(width // 2, dtype=torch.float64) * (-math.log(10000) / (width // 2 - 1)))
        angles = torch.arange(length + 1, dtype=torch.float64).unsqueeze(1) * frequencies
        table = torch.cat([angles.sin(), angles.cos()], dim=1).to(torch.get_default_dtype())
        self.register_buffer("table", table, persistent=False)

    def forward(self, places: Tensor) -> Tensor:
        return F.embedding(places, self.table)


class DecoderLayer(nn.Module):
    """Causal self-attention, attention to the source, then the feed-forward network."""

    def __init__(self, width: int, hidden: int, heads: int, dropout: float, norm: str) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.source_attention = Attention(width, heads)
        self.feed_forward = FeedForward(width, hidden)
        self.around_attention = Residual(width, dropout, norm)
        self.around_source_attention = Residual(width, dropout, norm)
        self.around_feed_forward = Residual(width, dropout, norm)

    def forward(self, x: Tensor, source: Known, mask: Tensor) -> Tensor:
        """All tokens of every row at once."""
        x = self.around_attention(x, lambda y: self.attention(y, causal=True))
        return self._read_source(x, source, mask)

    def step(self, x: Tensor, source: Known, mask: Tensor, known: list[Tensor]) -> Tensor:
        """The next token of every hypothesis: ``x`` is ``(sentences, hypotheses, width)``.

        ``known`` holds the keys and values of the tokens before, and of this one afterwards.
        """

        def attend(y: Tensor) -> Tensor:
            token, attention = y.flatten(0, 1).unsqueeze(1), self.attention
            both = attention.keys_and_values(token)
            known[:] = [torch.cat(parts, dim=2) for parts in zip(known, both, strict=True)] if known else both
            return attention.attend(attention.queries(token), *known).view_as(y)

        # The hypotheses of a sentence are queries to the same source, whose keys and values need not be repeated.
        return self._read_source(self.around_attention(x, attend), source, mask)

    def _read_source(self, x: Tensor, source: Known, mask: Tensor) -> Tensor:
        attention = self.source_attention
        x = self.around_source_attention(x, lambda y: attention.attend(attention.queries(y), *source, mask=mask))
        x = self.around_feed_forward(x, self.feed_forward)
        return x


class TranslationTransformer(nn.Module):
    """``logits = model(source, previous)``, of shape ``(B, T, vocabulary)``.

    Args:
        vocabulary: number of tokens, in a vocabulary shared by both languages.
        width, feed_forward, heads: of every layer.
        layers: of the encoder, and of the decoder.
        dropout: of the embeddings and of every residual branch.
        norm: "post", after each residual sum, or "pre", before each sublayer and once more at the end of both stacks.
        tie: "decoder" shares one matrix between the decoder's embedding and its outputs, "all" also with the encoder's
            embedding, "none" nothing.
        max_length: maximum number of tokens per row.

    Example:
        >>> model = TranslationTransformer(11, width=16, feed_forward=32, heads=2, layers=1)
        >>> model(torch.tensor([[4, 5, 2]]), torch.tensor([[1, 6]])).shape
        torch.Size([1, 2, 11])
    """

    def __init__(
        self,
        vocabulary: int,
        *,
        width: int = 512,
        feed_forward: int = 1024,
        heads: int = 4,
        layers: int = 6,
        dropout: float = 0.3,
        norm: str = "post",
        tie: str = "decoder",
        max_length: int = 1024,
    ) -> None:
        super().__init__()
        check_known("tie", tie, TIES)
        self.vocabulary, self.max_length = vocabulary, max_length
        settings = width, feed_forward, heads, dropout, norm
        self.encoder = nn.ModuleList(EncoderLayer(*settings) for _ in range(layers))
        self.decoder = nn.ModuleList(DecoderLayer(*settings) for _ in range(layers))
        self.encoder_norm = nn.LayerNorm(width) if norm == "pre" else nn.Identity()
        self.decoder_norm = nn.LayerNorm(width) if norm == "pre" else nn.Identity()
        self.positions = SinusoidalPositions(width, max_length)
        self.dropout = nn.Dropout(dropout)
        self.source_embedding = nn.Embedding(vocabulary, width)
        self.target_embedding = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        # The parameter is shared, not the module: `torch.func.functional_call` would not restore a shared module.
        if tie != "none":
            self.head.weight = self.target_embedding.weight
        if tie == "all":
            self.source_embedding.weight = self.target_embedding.weight
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """fairseq's initialisation: Xavier for projections, those of queries, keys and values as if stacked into one
        matrix (with PyTorch's biases), and normal embeddings of standard deviation ``width**-0.5``.
        """
        for module in self.modules():
            if isinstance(module, Attention):
                for projection in (module.q, module.k, module.v):
                    projection.reset_parameters()
                    nn.init.xavier_uniform_(projection.weight, gain=0.5**0.5)
                nn.init.xavier_uniform_(module.out.weight)
                nn.init.zeros_(module.out.bias)
            elif isinstance(module, FeedForward):
                for projection in (module.expand, module.contract):
                    nn.init.xavier_uniform_(projection.weight)
                    nn.init.zeros_(projection.bias)
            elif isinstance(module, nn.LayerNorm):
                module.reset_parameters()
        embeddings = self.source_embedding.weight, self.target_embedding.weight
        for weight in dict.fromkeys((*embeddings, self.head.weight)):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        for weight in embeddings:
            weight[PAD].zero_()

    def forward(self, source: Tensor, previous: Tensor) -> Tensor:
        """Logits of the token after each of ``previous`` (B, T), given ``source`` (B, S)."""
        memory = self.encode(source)
        x = self._embed(self.target_embedding, previous)
        for layer, known in zip(self._decoder_layers, memory.keys_and_values, strict=True):
            x = layer(x, known, memory.mask)
        logits: Tensor = self.head(self.decoder_norm(x))
        return logits

    def encode(self, source: Tensor) -> Memory:
        """Encode ``source`` (B, S) for the decoder."""
        real = source != PAD
        # A row of padding only attends to all of itself, because a softmax over nothing is NaN.
        mask = (real | ~real.any(dim=1, keepdim=True))[:, None, None, :]
        x = self._embed(self.source_embedding, source)
        for layer in self.encoder:
            x = layer(x, mask)
        x = self.encoder_norm(x)
        return Memory([layer.source_attention.keys_and_values(x) for layer in self._decoder_layers], mask)

    def decode(self, tokens: Tensor, memory: Memory, cache: list[list[Tensor]]) -> Tensor:
        """Logits ``(B, K, vocabulary)`` after one more token of each of the ``K`` hypotheses of every sentence.

        ``tokens`` is ``(B, K)`` without padding. ``cache`` holds, for each layer, the keys and values of the tokens so
        far, with a row for each hypothesis; empty lists at first.
        """
        x = self._embed(self.target_embedding, tokens, start=cache[0][0].shape[2] if cache[0] else 0)
        for layer, source, known in zip(self._decoder_layers, memory.keys_and_values, cache, strict=True):
            x = layer.step(x, source, memory.mask, known)
        logits: Tensor = self.head(self.decoder_norm(x))
        return logits

    @property
    def _decoder_layers(self) -> Sequence[DecoderLayer]:
        return cast(Sequence[DecoderLayer], self.decoder)

    def _embed(self, embedding: nn.Embedding, tokens: Tensor, start: int | None = None) -> Tensor:
        """Embed rows of tokens, or tokens that all stand at position ``start``, counted from 0."""
        if start is None and tokens.shape[1] > self.max_length:
            raise ValueError(f"{tokens.shape[1]} tokens exceed max_length={self.max_length}.")
        real = tokens != PAD
        places = real.cumsum(dim=1) if start is None else torch.full_like(tokens, start + 1)
        x = embedding.embedding_dim**0.5 * embedding(tokens) + self.positions(places)
        # Padding is made zero by multiplication, not by a zero row: the row of a tied matrix is trained, and the
        # derivatives of `padding_idx` differ between forward and reverse mode.
        out: Tensor = self.dropout(x * real.unsqueeze(-1))
        return out

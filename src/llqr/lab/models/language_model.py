"""A GPT-style language model: pre-norm, causal, learned positions, GELU, output matrix tied to the embedding.

Architecture and initialisation are those of GPT-2 (Radford et al., 2019), with separate projections for queries, keys
and values, and dropout on the embeddings and residual branches only.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from llqr.lab.models.sublayers import SelfAttentionLayer

GELU = partial(F.gelu, approximate="tanh")


class LanguageModel(nn.Module):
    """``logits = model(tokens)``, of shape ``(B, T, vocabulary)``, for the token after each of ``tokens``.

    Args:
        vocabulary: number of tokens.
        width, heads, layers: of the blocks.
        context: maximum number of tokens per sequence.
        dropout: of the embeddings and of every residual branch.
        tie: whether embedding and output matrix are shared.

    Example:
        >>> LanguageModel(11, width=16, heads=2, layers=1, context=8)(torch.tensor([[4, 5, 2]])).shape
        torch.Size([1, 3, 11])
    """

    def __init__(
        self,
        vocabulary: int,
        *,
        width: int = 768,
        heads: int = 12,
        layers: int = 12,
        context: int = 1024,
        dropout: float = 0.1,
        tie: bool = True,
    ) -> None:
        super().__init__()
        self.vocabulary, self.context = vocabulary, context
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        settings = width, 4 * width, heads, dropout, "pre", GELU
        self.blocks = nn.ModuleList(SelfAttentionLayer(*settings) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tie:
            self.head.weight = self.tokens.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal of standard deviation 0.02, zero biases; projections into the residual stream are scaled by depth."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, SelfAttentionLayer):
                for last in (module.attention.out, module.feed_forward.contract):
                    nn.init.normal_(last.weight, std=0.02 * (2 * len(self.blocks)) ** -0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.context:
            raise ValueError(f"tokens: {length} tokens exceed context={self.context}.")
        positions = torch.arange(length, device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x, causal=True)
        logits: Tensor = self.head(self.norm(x))
        return logits

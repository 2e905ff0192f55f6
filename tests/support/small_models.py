"""Networks small enough for dense Hessians, one of every kind the library must handle, in float64."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def mlp(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def batch_norm_cnn() -> nn.Sequential:
    """With running statistics that differ from any batch's, and in-place activations as ResNets have."""
    torch.manual_seed(2)
    norm = nn.BatchNorm2d(2)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2.0)
    layers = nn.Conv2d(1, 2, 3), norm, nn.ReLU(inplace=True), nn.Conv2d(2, 3, 2, bias=False), nn.Flatten()
    return nn.Sequential(*layers, nn.Dropout(0.5), nn.Linear(12, 3)).double()


class Attention(nn.Module):
    """Multi-head attention, projected by one fused `qkv` or by three layers, spelled out or by torch's fused kernel."""

    def __init__(self, dim: int, heads: int, *, fused: bool = False, kernel: bool = False) -> None:
        super().__init__()
        self.heads, self.kernel = heads, kernel
        if fused:
            self.qkv = nn.Linear(dim, 3 * dim)
        else:
            self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, memory: Tensor | None = None, causal: bool = False) -> Tensor:
        memory = x if memory is None else memory
        projected = self.qkv(x).chunk(3, -1) if hasattr(self, "qkv") else (self.q(x), self.k(memory), self.v(memory))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in projected)
        if self.kernel:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        else:
            scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
            if causal:
                future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
                scores = scores.masked_fill(future, -torch.inf)
            mixed = scores.softmax(-1) @ v
        return self.proj(mixed.transpose(1, 2).flatten(2))


class ViT(nn.Module):
    """Images of 4 x 4 in patches of 2 x 2, one pre-norm block."""

    def __init__(self, *, dim: int = 4, fused: bool = False, kernel: bool = False) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, dim, 2, stride=2)
        self.token = nn.Parameter(torch.randn(1, 1, dim))
        self.positions = nn.Parameter(torch.randn(1, 5, dim))
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, 2, fused=fused, kernel=kernel)
        self.wide, self.narrow = nn.Linear(dim, 6), nn.Linear(6, dim)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(dim, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        x = x + self.drop(self.attention(self.norm1(x)))
        x = x + self.narrow(F.gelu(self.wide(self.norm2(x))))
        return self.head(x[:, 0])


def vit(*, fused: bool = False, kernel: bool = False) -> ViT:
    torch.manual_seed(3)
    return ViT(fused=fused, kernel=kernel).double()


class Translator(nn.Module):
    """An encoder-decoder transformer: source, target and output embeddings are one parameter."""

    def __init__(self, vocabulary: int = 5, dim: int = 4, length: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.positions = nn.Parameter(torch.randn(length, dim))
        self.encoder, self.decoder, self.cross = (Attention(dim, 2) for _ in range(3))
        self.wide, self.narrow = nn.Linear(dim, 5), nn.Linear(5, dim)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(4))
        self.output = nn.Linear(dim, vocabulary, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.embedding(source) + self.positions
        memory = self.norms[0](memory + self.encoder(memory))
        x = self.embedding(target) + self.positions
        x = self.norms[1](x + self.decoder(x, causal=True))
        x = self.norms[2](x + self.cross(x, memory))
        x = self.norms[3](x + self.narrow(self.wide(x).relu()))
        return self.output(x)


def translator() -> Translator:
    torch.manual_seed(4)
    return Translator().double()


@dataclass
class Case:
    """A model with a loss and a batch."""

    model: nn.Module
    loss_fn: Any
    batch: tuple[Any, Tensor]


def tokens_loss(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """Cross-entropy of `(B, T, V)` logits."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **options)


def case(name: str) -> Case:
    """A fresh model of this name with a batch that fits it."""
    generator = torch.Generator().manual_seed(5)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def randint(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    if name == "mlp":
        return Case(mlp(), F.cross_entropy, (randn(7, 4), randint(3, 7)))
    if name == "batch-norm-cnn":
        return Case(batch_norm_cnn(), F.cross_entropy, (randn(5, 1, 5, 5), randint(3, 5)))
    if name in ("vit", "vit-fused", "vit-kernel"):
        model = vit(fused=name != "vit", kernel=name == "vit-kernel")
        return Case(model, F.cross_entropy, (randn(4, 1, 4, 4), randint(3, 4)))
    if name == "translator":
        return Case(translator(), tokens_loss, ((randint(5, 2, 3), randint(5, 2, 3)), randint(5, 2, 3)))
    raise KeyError(name)

"""Vision transformers (Dosovitskiy et al., 2021): pre-norm, class token, learned positions, in plain PyTorch.

Queries, keys and values have one projection ``qkv`` of width ``3 * dim``. The attention itself is PyTorch's fused
kernel, see `transformer.differentiable_forward`.
"""

from collections import OrderedDict
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class SelfAttention(nn.Module):
    """Multi-head self-attention over ``(batch, tokens, dim)``."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"heads must divide dim, got heads={heads} and dim={dim}.")
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        out: Tensor = self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


class ViTBlock(nn.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = SelfAttention(dim, heads)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        layers = {"fc1": nn.Linear(dim, 4 * dim), "gelu": nn.GELU(), "fc2": nn.Linear(4 * dim, dim)}
        self.mlp = nn.Sequential(OrderedDict(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


class ViT(nn.Module):
    """A vision transformer; the four published sizes are ``vit_ti``, ``vit_s``, ``vit_b`` and ``vit_l``."""

    def __init__(
        self,
        *,
        dim: int,
        depth: int,
        heads: int,
        classes: int = 1000,
        image_size: int = 224,
        channels: int = 3,
        patch: int = 16,
    ) -> None:
        super().__init__()
        if image_size % patch:
            raise ValueError(f"patch must divide image_size, got patch={patch} and image_size={image_size}.")
        tokens = (image_size // patch) ** 2 + 1
        self.patch_embedding = nn.Conv2d(channels, dim, kernel_size=patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(torch.empty(1, tokens, dim))
        self.blocks = nn.Sequential(*(ViTBlock(dim, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Truncated normal of standard deviation 0.02 for projections and positions; zero biases and class token."""
        nn.init.zeros_(self.class_token)
        nn.init.trunc_normal_(self.positions, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embedding(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1) + self.positions
        logits: Tensor = self.head(self.norm(self.blocks(x))[:, 0])
        return logits


# Ti and S are those of Touvron et al. (2021).
vit_ti = partial(ViT, dim=192, depth=12, heads=3)
vit_s = partial(ViT, dim=384, depth=12, heads=6)
vit_b = partial(ViT, dim=768, depth=12, heads=12)
vit_l = partial(ViT, dim=1024, depth=24, heads=16)

"""The cache returns what was appended to it, in the requested order."""

import torch

from llqr.lab.models.transformer import Cache


def test_appended_tokens_are_returned_and_rows_can_be_reordered():
    layers, rows, heads, width = 2, 3, 2, 4
    cache = Cache(layers, length=5)
    tokens = torch.randn(5, layers, 2, rows, heads, 1, width)
    known = None
    for step, token in enumerate(tokens):
        appended = [torch.stack(cache.append(layer, *token[layer])) for layer in range(layers)]
        cache.advance()
        newest = torch.stack(appended)
        known = token if known is None else torch.cat([known, token], dim=4)
        assert cache.held == step + 1
        assert torch.equal(newest, known)
        order = torch.randint(rows, (rows,))
        cache.reorder(order)
        known = known[:, :, order]


def test_it_has_the_device_and_dtype_of_the_keys():
    cache = Cache(1, 2)
    cache.reorder(torch.tensor([0]))  # nothing to change yet
    keys, _ = cache.append(0, *torch.ones(2, 1, 1, 1, 4, dtype=torch.bfloat16))
    assert keys.dtype == torch.bfloat16

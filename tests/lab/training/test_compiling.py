"""Which networks are compiled block by block."""

import pytest
import torch
from torch import nn

from llqr.lab import models
from llqr.lab.models.transformer import TranslationTransformer
from llqr.lab.passes import compile_network, repeated_blocks


@pytest.mark.parametrize(
    ("name", "count"), [("vit-ti", 12), ("vit-l", 24), ("resnet18", 0), ("pyramidnet110", 0), ("mlp", 0)]
)
def test_equal_blocks_are_found(name, count):
    with torch.device("meta"):
        assert len(repeated_blocks(models.build(name))) == count


def test_both_stacks_of_a_transformer():
    with torch.device("meta"):
        assert len(repeated_blocks(TranslationTransformer(11))) == 12


def test_blocks_are_compiled_in_place_and_anything_else_as_a_whole():
    with torch.device("meta"):
        vit, mlp = models.build("vit-ti"), models.build("mlp")
    names = list(vit.state_dict())
    assert compile_network(vit) is vit
    assert all(block._compiled_call_impl is not None for block in vit.blocks)
    assert list(vit.state_dict()) == names
    compiled = compile_network(mlp)
    assert isinstance(compiled, nn.Module)
    assert compiled is not mlp
    assert mlp._compiled_call_impl is None

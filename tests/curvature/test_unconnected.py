"""Outputs that do not depend on the weights they are given are refused: a gradient of zero would be accepted."""

import pytest
import torch
from torch import nn

from geometries import flat_geometry
from references import ONE_PROCESS

X, Y = torch.randn(6, 4), torch.randint(3, (6,))


class Detached(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            return super().forward(x)


class Kept(nn.Module):
    """Reads its weights from a list, where nothing can be given in their places."""

    def __init__(self, names):
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.kept = {name: parameter for name, parameter in self.named_parameters() if name in names}

    def forward(self, x):
        own = dict(self.named_parameters()) | self.kept
        hidden = torch.tanh(x @ own["first.weight"].t() + own["first.bias"])
        return hidden @ own["last.weight"].t() + own["last.bias"]


EVERY = ["first.weight", "first.bias", "last.weight", "last.bias"]


@pytest.mark.parametrize("engine", ["auto", *(name for name in ONE_PROCESS if name != "linearised")])
@pytest.mark.parametrize("model", [Detached(4, 3), Kept(EVERY)], ids=["detached", "kept"])
def test_no_weight_is_connected(model, engine):
    geometry = flat_geometry(model, nn.functional.cross_entropy, steps=2, engine=engine)
    with pytest.raises(RuntimeError, match="model: its outputs do not depend on the weights given for"):
        geometry.refresh((X, Y))
    assert not geometry.metric.learned


@pytest.mark.parametrize("kept", [["first.weight"], ["last.bias", "first.bias"]])
@pytest.mark.parametrize("again", [False, True])
def test_one_weight_is_not_connected(kept, again):
    """Refused by name, also when the refresh is tried again."""
    geometry = flat_geometry(Kept(kept), nn.functional.cross_entropy, steps=2, engine="double-backward")
    if again:
        with pytest.raises(RuntimeError):
            geometry.refresh((X, Y))
    with pytest.raises(RuntimeError, match=f"weights given for {', '.join(sorted(kept))},"):
        geometry.refresh((X, Y))


def test_all_weights_are_connected():
    geometry = flat_geometry(Kept([]), nn.functional.cross_entropy, steps=2)
    assert geometry.refresh((X, Y)).accepted

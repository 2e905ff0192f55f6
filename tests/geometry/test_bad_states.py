"""A saved state that does not fit, or a model that has changed, is refused by name; other settings are kept."""

import copy

import pytest
import torch
import torch.nn.functional as F

from geometries import flat_geometry
from small_models import case


def learned():
    drawn = case("mlp")
    geometry = flat_geometry(drawn.model, F.cross_entropy, structure="diagonal")
    assert geometry.refresh(drawn.batch).accepted
    return drawn, geometry


def broken_factor(state):
    next(iter(state["metric"]["factors"].values())).fill_(torch.nan)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda state: state.update(engine="guessed"), "state_dict: unknown engine 'guessed'"),
        (broken_factor, "state_dict: factor '0.weight' is not finite"),
    ],
    ids=["engine", "factor"],
)
def test_a_damaged_state_is_refused(damage, sentence):
    _, geometry = learned()
    before = copy.deepcopy(geometry.state_dict())
    damaged = copy.deepcopy(before)
    damage(damaged)
    with pytest.raises(ValueError, match=sentence):
        geometry.load_state_dict(damaged)
    assert geometry.engine == before["engine"]
    assert geometry.state_dict()["counters"] == before["counters"]
    for name, factor in geometry.metric.named_factors().items():
        assert factor.equal(before["metric"]["factors"][name])


def test_a_model_that_has_changed_its_dtype_is_refused():
    drawn, geometry = learned()
    drawn.model.float()
    with pytest.raises(RuntimeError, match=r"model: '0.weight' moved from cpu, torch.float64 to cpu, torch.float32"):
        geometry.refresh((drawn.batch[0].float(), drawn.batch[1]))


@pytest.mark.parametrize(
    ("settings", "engine"),
    [({}, "linearised"), ({"engine": "double-backward"}, "double-backward"), ({"micro_batch": 4}, "auto")],
    ids=["open", "chosen", "micro_batch"],
)
def test_the_engine_of_a_saved_run_is_taken_where_the_runtime_leaves_it_open(settings, engine):
    drawn, geometry = learned()
    state = geometry.state_dict() | {"engine": "linearised"}
    resumed = flat_geometry(drawn.model, F.cross_entropy, structure="diagonal", **settings)
    resumed.load_state_dict(state)
    assert resumed.engine == engine

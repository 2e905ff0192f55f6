"""`U g` replayed is `U g` applied, for every gradient and every metric; graphs themselves are in test_captured.py."""

import copy

import pytest
import torch
import torch.nn.functional as F

from geometries import flat_geometry
from llqr import Metric
from llqr.metric import captured as recorded
from metric.test_metric import KINDS, perturbed
from references import trainable
from small_models import batch_norm_cnn, vit


@pytest.fixture(autouse=True)
def replays(monkeypatch):
    """In the place of a graph: the action is done again, its results are copied to where they were before."""
    made = []

    def record(action):
        results = action()

        def replay():
            made[-1] += 1
            for name, result in action().items():
                results[name].copy_(result)

        made.append(0)
        return replay, results

    monkeypatch.setattr(recorded, "record", record)
    return made


def gradients(model):
    return {name: torch.randn_like(parameter) for name, parameter in trainable(model).items()}


@pytest.mark.parametrize("apply_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("model", [batch_norm_cnn, lambda: vit(fused=True)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_gradient_and_every_metric(kind, model, apply_dtype, replays):
    network = model().float().to(memory_format=torch.channels_last)
    metric = perturbed(Metric(network, structure=kind, apply_dtype=apply_dtype))
    action = recorded.RecordedAction(metric, gradients(network))
    for seed in range(3):
        for _ in range(2):
            grads = gradients(network)
            moved, expected = action(grads), metric.apply(grads)
            assert list(moved) == list(expected)
            for name in expected:
                assert moved[name].equal(expected[name])
                assert (moved[name].dtype, moved[name].stride()) == (expected[name].dtype, expected[name].stride())
        perturbed(metric, seed)
    assert replays == [6]


@pytest.mark.parametrize(("structure", "times"), [("kfac", [3]), ("diagonal", [])])
def test_recorded_once_and_only_where_it_helps(structure, times, replays, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    model = vit().float()
    batch = torch.randn(4, 1, 4, 4), torch.randint(3, (4,))
    geometry = flat_geometry(model, F.cross_entropy, structure=structure, steps=2, engine="forward")
    replayed = recorded.ReplayedMetric(geometry.metric)
    grads = gradients(model)
    assert replayed.apply(grads) == grads  # nothing is learned yet, nothing recorded
    for _ in range(3):
        geometry.refresh(batch)
        moved, expected = replayed.apply(grads), geometry.metric.apply(grads)
        assert all(moved[name].equal(expected[name]) for name in grads)
    missing, *names = grads  # a parameter without a gradient: not replayed
    some = replayed.apply({name: grads[name] for name in names})
    assert all(torch.allclose(some[name], expected[name], atol=1e-6) for name in names)
    assert missing not in some
    assert replays == times


def test_inside_a_callers_graph_nothing_is_replayed(replays, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    model = vit().float()
    metric, grads = perturbed(Metric(model, structure="kfac")), gradients(model)
    moved, expected = recorded.ReplayedMetric(metric).apply(grads), metric.apply(grads)
    assert all(moved[name].equal(expected[name]) for name in grads)
    assert replays == []


def test_a_copy_records_for_itself(replays, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    model = vit().float()
    metric, grads = perturbed(Metric(model, structure="kfac")), gradients(model)
    replayed = recorded.ReplayedMetric(metric)
    expected = replayed.apply(grads)
    twin = copy.deepcopy(replayed).apply(grads)
    assert all(twin[name].equal(expected[name]) and twin[name] is not expected[name] for name in grads)
    assert replays == [1, 1]

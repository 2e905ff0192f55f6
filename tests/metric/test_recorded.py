"""`U g` replayed is `U g` applied, for every gradient and every metric; graphs themselves are in test_captured.py."""

import pytest
import torch
import torch.nn.functional as F

import llqr
from llqr import Metric
from llqr.metric import recorded
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


def test_a_geometry_records_once_and_only_where_it_helps(replays, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    model = vit().float()
    batch = torch.randn(4, 1, 4, 4), torch.randint(3, (4,))
    for structure, times in (("kfac", 3), ("diagonal", None)):
        replays.clear()
        geometry = llqr.Geometry(model, F.cross_entropy, structure=structure, steps=2, engine="forward")
        parameters = list(model.parameters())
        grads = [torch.randn_like(parameter) for parameter in parameters]
        for _ in range(3):
            geometry._capture = False  # a refresh cannot be captured here
            geometry.refresh(batch)
            expected = geometry.transport(parameters, grads)
            geometry._capture = True
            moved = geometry.transport(parameters, grads)
            assert all(map(torch.equal, moved, expected))
        some = geometry.transport(parameters[1:], grads[1:])  # a parameter without a gradient: not replayed
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(some, expected[1:], strict=True))
        assert replays == ([] if times is None else [times])

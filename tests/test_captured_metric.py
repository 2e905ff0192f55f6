"""A captured `U g` equals the eager one for every gradient and metric; real graphs are tested in test_cuda.py."""

import copy

import pytest
import torch
import torch.nn.functional as F

from geometries import flat_geometry
from llqr import Metric, cuda
from metric.test_metric import KINDS, perturbed
from references import trainable
from small_models import batch_norm_cnn, vit


@pytest.fixture(autouse=True)
def replays(monkeypatch):
    """Instead of a graph: computes again and copies the results to where they were. Replays are counted per graph."""
    made = []

    def capture(compute):
        results = compute()

        def replay():
            made[-1] += 1
            for name, result in compute().items():
                results[name].copy_(result)

        made.append(0)
        return replay, results

    monkeypatch.setattr(cuda, "capture", capture)
    return made


def gradients(model):
    return {name: torch.randn_like(parameter) for name, parameter in trainable(model).items()}


@pytest.mark.parametrize("apply_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("model", [batch_norm_cnn, lambda: vit(fused=True)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_gradient_and_every_metric(kind, model, apply_dtype, replays, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    network = model().float().to(memory_format=torch.channels_last)
    metric = perturbed(Metric(network, structure=kind, apply_dtype=apply_dtype))
    captured = cuda.CapturedMetric(metric)
    captured._worth_it = True  # also without matrix products
    for seed in range(3):
        for _ in range(2):
            grads = gradients(network)
            Ug, expected = captured.apply(grads), metric.apply(grads)
            assert list(Ug) == list(expected)
            for name in expected:
                assert Ug[name].equal(expected[name])
                assert (Ug[name].dtype, Ug[name].stride()) == (expected[name].dtype, expected[name].stride())
        perturbed(metric, seed)
    assert replays == [6]


@pytest.mark.parametrize("apply_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_factors_in_the_dtype_of_the_metric_are_held_once(dtype, apply_dtype, monkeypatch):
    once = apply_dtype in (None, dtype)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    model = vit().float()
    metric = perturbed(Metric(model, structure="kfac", dtype=dtype, apply_dtype=apply_dtype))
    captured = cuda.CapturedMetric(metric)
    for seed in range(3):
        Ug, expected = captured.apply(grads := gradients(model)), metric.apply(grads)
        assert all(Ug[name].equal(expected[name]) for name in grads)
        for group, own, read in zip(metric.groups, metric.factors(), captured._factors, strict=True):
            shared = [own[name].data_ptr() == read[name].data_ptr() for name in own]
            assert shared == [once or not group.multiplies] * len(own)
        perturbed(metric, seed)


@pytest.mark.parametrize(("structure", "times"), [("kfac", [3]), ("diagonal", [])])
def test_captured_once_and_only_where_it_helps(structure, times, replays, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    model = vit().float()
    batch = torch.randn(4, 1, 4, 4), torch.randint(3, (4,))
    geometry = flat_geometry(model, F.cross_entropy, structure=structure, steps=2, engine="forward")
    metric = cuda.CapturedMetric(geometry.metric)
    grads = gradients(model)
    assert metric.apply(grads) == grads  # nothing is learned yet, nothing is captured
    for _ in range(3):
        geometry.refresh(batch)
        Ug, expected = metric.apply(grads), geometry.metric.apply(grads)
        assert all(Ug[name].equal(expected[name]) for name in grads)
    missing, *names = grads  # a parameter without a gradient: not replayed
    some = metric.apply({name: grads[name] for name in names})
    assert all(torch.allclose(some[name], expected[name], atol=1e-6) for name in names)
    assert missing not in some
    assert replays == times


def test_inside_a_callers_graph_nothing_is_replayed(replays, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    model = vit().float()
    metric, grads = perturbed(Metric(model, structure="kfac")), gradients(model)
    Ug, expected = cuda.CapturedMetric(metric).apply(grads), metric.apply(grads)
    assert all(Ug[name].equal(expected[name]) for name in grads)
    assert replays == []


def test_a_copy_captures_its_own_graph(replays, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    model = vit().float()
    metric, grads = perturbed(Metric(model, structure="kfac")), gradients(model)
    original = cuda.CapturedMetric(metric)
    expected = original.apply(grads)
    twin = copy.deepcopy(original).apply(grads)
    assert all(twin[name].equal(expected[name]) and twin[name] is not expected[name] for name in grads)
    assert replays == [1, 1]

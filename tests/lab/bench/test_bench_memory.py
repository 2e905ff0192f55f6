"""Peak bytes by method and structure; the counter itself needs a GPU."""

import itertools

import pytest
import torch

import llqr
from llqr.lab.bench import memory
from llqr.lab.bench.measured_refresh import RefreshSettings
from llqr.lab.bench.workload import Network, Setup
from llqr.lab.config.strict import ConfigurationError
from tiny_workloads import FP32, MLP

PLAIN = [("SGD", None), ("AdamW", None), ("SAM", None), ("F-SAM", None)]


def measured(structures):
    count = itertools.count(1)

    def peak(action):
        action()
        return next(count)

    runtime, inner = llqr.Runtime(engine="forward"), llqr.Inner(steps=2)
    settings = [RefreshSettings(structure, runtime=runtime, inner=inner) for structure in structures]
    return list(memory.measure(Setup([Network.parse(MLP)], 4, FP32), settings, peak))


def test_every_method_and_structure_is_measured_once():
    rows = measured(["diagonal", "kfac"])
    assert [(row["what"], row["structure"]) for row in rows] == [
        *PLAIN,
        ("LLQR", "diagonal"),
        ("LLQR+SAM", "diagonal"),
        ("refresh", "diagonal"),
        ("LLQR", "kfac"),
        ("LLQR+SAM", "kfac"),
        ("refresh", "kfac"),
        ("refresh without factors", "scalar"),
    ]
    assert [row["peak_bytes"] for row in rows] == list(range(1, 12))
    assert [row["vs_sam"] for row in rows] == [n / 3 for n in range(1, 12)]
    assert memory.as_table(rows).row_count == 11


def test_the_bytes_of_the_metric_are_given_too():
    """The network has Linear(12, 4) and Linear(4, 3): 67 parameters in 2 layers."""
    rows = {(row["what"], row["structure"]): row["metric_bytes"] for row in measured(["diagonal", "e-kfac"])}
    assert rows["SAM", None] == 0
    assert rows["LLQR+SAM", "diagonal"] == rows["refresh", "diagonal"] == 4 * 67
    assert rows["refresh", "e-kfac"] == 4 * ((16 + 144 + 48 + 4) + (9 + 16 + 12 + 3))
    assert rows["refresh without factors", "scalar"] == 4 * 2


def test_peak_memory_needs_a_cuda_device():
    with pytest.raises(ConfigurationError, match="--device: peak memory is counted by the allocator of a CUDA device"):
        memory.cuda_peak(torch.device("cpu"))

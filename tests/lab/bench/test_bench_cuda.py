"""What only a GPU can do: events, CUDA graphs and counted bytes."""

import json

import pytest
import torch
from typer.testing import CliRunner

from llqr.lab.cli.bench import bench_app
from tiny_workloads import CNN, VIT

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SHARED = ["--device", "cuda", "--batch", "4", "--quiet"]


@pytest.fixture
def bench(tmp_path):
    def run(*arguments):
        out = tmp_path / "x.json"
        result = CliRunner().invoke(bench_app, [*arguments, *SHARED, "--out", str(out)], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return json.loads(out.read_text())

    return run


@pytest.mark.parametrize("engine", ["forward", "linearised"])
@pytest.mark.parametrize("form", ["--capture", "--no-capture"])
def test_a_reduced_precision_refresh_states_its_error(bench, form, engine):
    settings = ["--engine", engine, "--attention", "unfused", "--set", "inner.steps=5", "--repeats", "2"]
    [row] = bench("refresh", "--model", VIT, form, *settings, "--reference", "float64")["rows"]
    assert 0 < row["errors"]["Ug"] < 0.1


def test_an_epoch_is_put_together_from_captured_passes_and_refreshes(bench):
    found = bench("cadence", "--model", CNN, "--engine", "forward", "--set", "inner.steps=2", "--repeats", "2")
    assert len(found["rows"]) == 15
    assert "gpu" in found["machine"]
    assert found["config"]["precision"] == "bf16"
    assert all(row["step_seconds"]["low"] > 0 for row in found["rows"])


def test_memory_is_counted(bench):
    rows = bench("memory", "--model", CNN, "--engine", "forward")["rows"]
    peaks = {(row["what"], row["structure"]): row["peak_bytes"] for row in rows}
    assert min(peaks.values()) > 0
    assert peaks["LLQR", "e-kfac"] > peaks["SGD", None]

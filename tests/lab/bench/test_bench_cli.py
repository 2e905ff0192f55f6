"""`llqr bench`: tables, JSON files, and one sentence for bad arguments."""

import json
import runpy
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import llqr
from llqr.lab.cli.bench import bench_app
from llqr.lab.errors import ConfigurationError
from tiny_workloads import CNN, MLP

SHARED = ["--device", "cpu", "--batch", "4", "--model", MLP]
COMMANDS = {
    "refresh": ["--structure", "diagonal,kfac", "--engine", "forward,double-backward", "--set", "inner.steps=2"],
    "cadence": ["--engine", "forward", "--set", "inner.steps=2", "--repeats", "2", "--refresh-repeats", "1"],
    "scaling": ["--model", CNN, "--engine", "forward", "--set", "inner.steps=2", "--repeats", "2"],
    "peers": ["--repeats", "2"],
}
ROWS = {"refresh": 4, "cadence": 15, "scaling": 2, "peers": 10}


def bench(*arguments):
    return CliRunner().invoke(bench_app, list(arguments))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_records_its_numbers_and_their_origin(command, tmp_path, monkeypatch):
    out = tmp_path / "new folder" / "numbers.json"
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/llqr", "bench", command, "--out", str(out)])
    result = bench(command, *SHARED, *COMMANDS[command], "--out", str(out))
    assert result.exit_code == 0, result.output
    assert command in result.stdout
    written = json.loads(out.read_text())
    assert written["bench"] == command
    assert written["command"] == f"llqr bench {command} --out numbers.json"
    assert {"commit", "dirty"} <= written.keys()
    assert written["versions"]["torch"] == torch.__version__
    assert written["versions"]["llqr"] == llqr.__version__
    assert written["machine"]["device"] == "cpu"
    assert written["config"]["models"][0] == MLP
    assert (written["config"]["batch"], written["config"]["precision"]) == (4, "fp32")
    assert len(written["rows"]) >= ROWS[command]
    assert list(tmp_path.rglob("*.part")) == []


def test_a_measurement_is_drawn_from_its_file(tmp_path):
    kept = tmp_path / "scaling.json"
    result = bench("scaling", *SHARED, *COMMANDS["scaling"], "--out", str(kept))
    assert result.exit_code == 0, result.output
    script = runpy.run_path(str(Path(__file__).parents[3] / "docs/figures/bench.py"))
    script["save"](script["read"](kept), tmp_path / "scaling.svg", "")
    assert "seconds of a refresh" in (tmp_path / "scaling.svg").read_text()
    kept.write_text(kept.read_text().replace('"complete": true', '"complete": false'))
    with pytest.raises(SystemExit, match="was interrupted"):
        script["read"](kept)


def test_a_refresh_states_its_error(tmp_path):
    out = tmp_path / "refresh.json"
    settings = [
        "--structure",
        "e-kfac",
        "--set",
        "inner.steps=3",
        "--repeats",
        "1",
        "--reference",
        "float64",
        "--quiet",
    ]
    assert bench("refresh", *SHARED, *settings, "--out", str(out)).exit_code == 0
    [row] = json.loads(out.read_text())["rows"]
    assert row["engine"] == "double-backward"
    assert all(error < 1e-4 for error in row["errors"].values())
    assert {"median", "low", "high", "n"} == row["seconds"].keys()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("0", "inner: product_every: expected a number >= 1, got 0"),
        ("three", "inner.product_every must be an integer, got 'three'"),
        ("3,-1", "inner: product_every: expected a number >= 1, got -1"),
        ("2.5", "inner.product_every must be an integer, got 2.5"),
    ],
)
def test_steps_between_products_are_whole_numbers(text, sentence):
    result = bench("refresh", *SHARED, "--product-every", text)
    assert isinstance(result.exception, ConfigurationError)
    assert sentence in str(result.exception)


def test_scaling_concludes_with_the_exponent(tmp_path):
    out = tmp_path / "scaling.json"
    assert bench("scaling", *SHARED, *COMMANDS["scaling"], "--out", str(out)).exit_code == 0
    written = json.loads(out.read_text())
    assert written["exponent"]["n"] == 2
    assert written["paper_exponent"] == [1.27, 1.28]


@pytest.mark.parametrize(
    ("sentence", "arguments"),
    [
        ("--precision must be one of", ["peers", "--precision", "fp8"]),
        ("--model must be one of", ["peers", "--model", "alexnet"]),
        ("--reference must be one of", ["refresh", "--reference", "float16"]),
        ("structure: unknown", ["cadence", "--model", MLP, "--structure", "round"]),
        ("runtime.apply_dtype must be a torch.dtype", ["cadence", "--apply-dtype", "fp16"]),
        ("attention must be one of fused, unfused", ["refresh", "--attention", "flash"]),
        ("engine: unknown 'magic'", ["scaling", "--engine", "magic"]),
        ("unknown key inner.step;", ["scaling", "--set", "inner.step=3"]),
        ("--device: peak memory is counted", ["memory"]),
    ],
)
def test_bad_arguments_are_named(sentence, arguments):
    result = bench(*arguments, "--device", "cpu")
    assert isinstance(result.exception, ConfigurationError)
    assert sentence in str(result.exception)

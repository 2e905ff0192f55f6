"""`llqr toy`: every command writes figures and numbers, and prints what it found."""

import json

import pytest
from typer.testing import CliRunner

from llqr.lab.cli.toy import app

pytestmark = pytest.mark.slow

SMALL = {
    "escape": (["--starts", "4", "--steps", "150"], ["escape"]),
    "noise": (["--seeds", "3", "--steps", "150"], ["noise", "damping"]),
    "hover": ([], ["hover"]),
    "selection": (["--cycles", "300", "--seeds", "2", "--steps", "150"], ["selection"]),
    "transfer": (["--steps", "200"], ["transfer"]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("toy")
    for command, (options, _) in SMALL.items():
        done = CliRunner().invoke(app, ["toy", command, "--out", str(out), *options])
        assert done.exit_code == 0, done.output
        assert str(out) in done.stdout.replace("\n", "")
    return out


@pytest.mark.parametrize("command", SMALL)
def test_a_command_writes_figures_and_numbers(folder, command):
    for figure in SMALL[command][1]:
        assert (folder / f"{figure}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (folder / f"{figure}.svg").read_text()
    record = json.loads((folder / f"{command}.json").read_text())
    assert record["command"].startswith(f"llqr toy {command}")
    assert record["numbers"]


def test_the_phase_command_prints_the_agreement(tmp_path):
    done = CliRunner().invoke(
        app, ["toy", "phase", "--out", str(tmp_path), "--rows", "3", "--columns", "10", "--steps", "1500"]
    )
    assert done.exit_code == 0, done.output
    numbers = json.loads((tmp_path / "phase.json").read_text())["numbers"]
    assert f"agreement_off_line: {numbers['diagrams']['llqr+sam']['agreement_off_line']:.4g}" in done.stdout


def test_a_learning_rate_without_a_two_cycle_is_refused(tmp_path):
    done = CliRunner().invoke(app, ["toy", "hover", "--out", str(tmp_path), "--eta", "5"])
    assert done.exit_code == 2
    assert "eta is too large" in done.output

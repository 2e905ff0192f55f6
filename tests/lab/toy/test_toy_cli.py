"""`llqr toy`: every experiment gives figures and numbers, which the command writes and prints."""

import json
from pkgutil import resolve_name

import pytest

from llqr.lab.cli.toy import EXPERIMENTS
from llqr.lab.toy.experiment import save, single_numbers

SMALL = {
    "escape": ({"starts": 4, "steps": 150}, ["escape"]),
    "noise": ({"seeds": 3, "steps": 150}, ["noise", "damping"]),
    "hover": ({}, ["hover"]),
    "phase": ({"rows": 3, "columns": 10, "steps": 1500}, ["phase", "rate"]),
    "selection": ({"cycles": 300, "seeds": 2, "steps": 150}, ["selection"]),
    "transfer": ({"steps": 200}, ["transfer"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_gives_figures_and_numbers(tmp_path, name):
    sizes, figures = SMALL[name]
    result = resolve_name(f"llqr.lab.toy.{name}:run_{name}")(**sizes)
    save(name, result, tmp_path, f"llqr toy {name}")
    for figure in figures:
        assert (tmp_path / f"{figure}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (tmp_path / f"{figure}.svg").read_text()
    record = json.loads((tmp_path / f"{name}.json").read_text())
    assert record["command"] == f"llqr toy {name}"
    assert record["numbers"]
    if name == "phase":
        off_line = record["numbers"]["diagrams"]["llqr+sam"]["agreement_off_line"]
        assert f"diagrams.llqr+sam.agreement_off_line: {off_line:.4g}" in single_numbers(result.numbers)


@pytest.mark.slow
def test_the_command_writes_and_prints_what_it_found(llqr, tmp_path):
    code, out, _ = llqr("toy", "escape", "--anisotropy", "2")
    assert code == 0
    assert "constants.anisotropy: 2" in out
    record = json.loads((tmp_path / "runs/toy/escape-anisotropic.json").read_text())
    assert record["command"] == "llqr toy escape --anisotropy 2"
    assert record["figures"] == ["escape-anisotropic"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["hovre"], "NAME must be one of hover, escape, noise, phase, selection, transfer, all, got 'hovre'"),
        (["hover", "--anisotropy", "2"], "--anisotropy belongs to escape and noise, got it with hover."),
    ],
)
def test_bad_arguments_are_named(llqr, arguments, sentence):
    code, _, err = llqr("toy", *arguments)
    assert code == 2
    assert sentence in err

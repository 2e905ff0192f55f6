"""Options made from dataclasses: names, types, defaults, help, sweeps and errors."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import pytest
import torch
import typer
from typer.testing import CliRunner

import llqr
from llqr.lab.cli.bench import DECIDED, bench_app
from llqr.lab.cli.dataclass_options import Fields, attribute_help, options_from_dataclasses
from llqr.lab.config.strict import ConfigurationError


@dataclass(frozen=True)
class Oven:
    """Bakes.

    Attributes:
        heat: degrees,
            at least one.
        low_dtype, high_dtype: of `x`.

    Example:
        >>> Oven().heat
        200
    """

    heat: int = 200
    fan: bool = False
    scale: str | float | None = None
    low_dtype: torch.dtype | None = None
    high_dtype: torch.dtype = torch.float64

    def __post_init__(self):
        if self.heat < 1:
            raise ValueError(f"heat: expected a number >= 1, got {self.heat}")


@dataclass(frozen=True)
class Cake:
    name: str = "plum"
    pan: Annotated[Path | None, typer.Option(help="Where it is baked.")] = None
    oven: Oven = Oven()


PLAIN = Cake()
TWO = (Cake("plum"), Cake("apple"))


def run(command, *arguments):
    app = typer.Typer()
    app.command()(options_from_dataclasses(command))
    return CliRunner().invoke(app, list(arguments))


def made(*arguments):
    found = []

    def command(cake: Cake = PLAIN, size: int = 1) -> None:
        found.append((cake, size))

    result = run(command, *arguments)
    if result.exception is not None:
        raise result.exception
    return found[0]


def test_without_arguments_the_default_is_handed_over():
    assert made() == (PLAIN, 1)


def test_fields_of_nested_dataclasses_are_options_too():
    arguments = ["--name", "pear", "--heat", "180", "--fan", "--low-dtype", "bfloat16", "--size", "2", "--pan", "x"]
    assert made(*arguments) == (Cake("pear", Path("x"), Oven(180, True, low_dtype=torch.bfloat16)), 2)


@pytest.mark.parametrize(("text", "value"), [("sum", "sum"), ("2", 2.0)])
def test_text_or_a_number(text, value):
    assert made("--scale", text)[0].oven.scale == value


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--heat", "warm"], "command line: --heat must be an integer, got 'warm'."),
        (["--heat", "0"], "--heat: expected a number >= 1, got 0"),
        (["--low-dtype", "nn"], "command line: --low-dtype must be a torch.dtype, got 'nn'."),
    ],
)
def test_bad_values_are_named_by_their_option(arguments, sentence):
    with pytest.raises(ConfigurationError) as raised:
        made(*arguments)
    assert str(raised.value) == sentence


def test_an_error_that_names_no_option_stays_as_it_is():
    def command(cake: Cake = PLAIN) -> None:
        raise ValueError("flour: none left")

    result = run(command)
    assert type(result.exception) is ValueError
    assert str(result.exception) == "flour: none left"


def test_swept_fields_give_every_combination_and_omitted_ones_keep_their_default():
    found = []

    def command(cakes: Annotated[tuple[Cake, ...], Fields(omit=("fan",), sweep=("name", "heat"))] = TWO) -> None:
        found.append([(cake.name, cake.oven.heat) for cake in cakes])

    assert run(command, "--heat", "1, 2").exit_code == 0
    assert run(command, "--name", "pear").exit_code == 0
    assert run(command, "--fan").exit_code == 2
    assert found == [[("plum", 1), ("plum", 2), ("apple", 1), ("apple", 2)], [("pear", 200)]]


def test_the_help_is_the_docstrings():
    assert attribute_help(Oven) == {
        "heat": "Degrees, at least one.",
        "low_dtype": "Of x.",
        "high_dtype": "Of x.",
    }
    assert attribute_help(Cake) == {}


@pytest.mark.parametrize("cls", [llqr.Inner, llqr.Runtime])
def test_every_field_of_the_library_is_an_option_of_a_measured_refresh_with_its_help(cls):
    shown = CliRunner().invoke(bench_app, ["refresh", "--help"], env={"COLUMNS": "1000"}).output
    for field in fields(cls):
        assert attribute_help(cls)[field.name]
        if field.name not in DECIDED:
            assert f"--{field.name.replace('_', '-')} " in shown
            assert attribute_help(cls)[field.name].split()[0] in shown

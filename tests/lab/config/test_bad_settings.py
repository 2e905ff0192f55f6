"""Every setting of a recipe with bad values: refused before anything is trained, in a sentence that names the setting.

Settings that the library checks are found by trying the library; a value that is accepted here must also train.
"""

import dataclasses
import typing

import pytest
import torch

import llqr
from llqr.lab.config import recipe
from llqr.lab.config.settings import (
    Base,
    Choice,
    DataChoice,
    GeometrySettings,
    LrSchedule,
    OptimizerSettings,
    Probe,
    TrainingSettings,
)
from llqr.lab.config.strict import ConfigurationError
from llqr.lab.data.resident import ResidentOptions
from llqr.lab.errors import DataError, Diverged
from llqr.lab.progress import Display
from llqr.lab.runs.planned import plan
from llqr.lab.stop import Stop
from llqr.lab.tasks.task import TaskOptions
from llqr.lab.training.loop import Execution, Training

TABLES = {
    "task": Choice,
    "task.options": TaskOptions,
    "data": DataChoice,
    "data.options": ResidentOptions,
    "model": Choice,
    "training": TrainingSettings,
    "schedule": LrSchedule,
    "optimizer": OptimizerSettings,
    "bases.sgdm": Base,
    "bases.adam": Base,
    "probes.sam": Probe,
    "probes.fsam": Probe,
    "probes.fishersam": Probe,
    "geometries.ngd": GeometrySettings,
    "geometries.ngd.inner": llqr.Inner,
    "geometries.ngd.runtime": llqr.Runtime,
}
METHODS = {"bases.adam": "adam", "probes.fsam": "fsam", "probes.fishersam": "fishersam", "geometries": "llqr+sam"}
BAD = ("-1", "0", "nan", "inf", "1e300", "0.5", "foo", "true", "[]", "[-1]", "{a=1}", "''")
SMALL = ("training.batch_size=16", "geometries.ngd.every=3", "geometries.ngd.inner.steps=2", "training.epochs=1")

NESTED = (llqr.Inner, llqr.Runtime)


class AfterFiveSteps(Stop):
    left = 5

    @property
    def requested(self):
        self.left -= 1
        return self.left <= 0


def settings(tables):
    for table, cls in tables.items():
        hints = typing.get_type_hints(cls)
        yield from (f"{table}.{field.name}" for field in dataclasses.fields(cls) if hints[field.name] not in NESTED)


def outcome(call, *arguments):
    """What the call returns, or None and the sentence of an error that is not a bug."""
    try:
        return call(*arguments), ""
    except (ConfigurationError, DataError, Diverged) as error:
        return None, str(error)


@pytest.mark.slow
@pytest.mark.parametrize("key", [*settings(TABLES), "seeds", "columns", "model.options.hidden"])
def test_a_bad_value_is_refused_by_name_or_can_be_trained_with(key, tmp_path):
    method = next((name for table, name in METHODS.items() if key.startswith(table)), "sam")
    for number, value in enumerate(BAD):
        loaded, sentence = outcome(recipe.load, "digits/mlp", [*SMALL, f"{key}={value}"])
        if loaded is None:
            assert key.rpartition(".")[2] in sentence
            assert "\n" not in sentence
            continue
        (planned,) = plan("digits/mlp", loaded, [method], [0], tmp_path / str(number))
        planned.path.mkdir(parents=True)
        cpu = torch.device("cpu")
        training, sentence = outcome(Training, planned, planned.run.load_task(cpu), Execution(cpu))
        if training is not None:
            _, sentence = outcome(training.run, AfterFiveSteps(), Display(quiet=True))
        assert "\n" not in sentence


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "geometries.ngd.every=0",
            "digits/mlp: geometries.ngd: every: expected a number in [1, inf)",
        ),
        ("probes.sam.rho=-1", "digits/mlp: probes.sam: rho: expected a number in [0, inf)"),
        ("bases.sgdm.lr=-1", "digits/mlp: bases.sgdm: lr: expected a number in [0, 3.40282e+38]"),
        ("geometries.ngd.structure=e-kfca", "got 'e-kfca'; did you mean e-kfac?"),
        ('geometries.ngd.structure={"nothing.*"="diagonal"}', "geometries.ngd: structure: the pattern 'nothing.*'"),
        ("bases.sgdm={nesterov=true, momentum=0.0}", "bases.sgdm: Nesterov momentum requires a momentum"),
    ],
)
def test_the_command_line_refuses_it_before_anything_is_trained(override, sentence, capsys, tmp_path):
    from llqr.lab.cli.app import main

    overrides = ["--set", "geometries.ngd.structure=e-kfac", "--set", override]
    with pytest.raises(SystemExit) as exit_:
        main(["train", "digits/mlp", "--method", "llqr+sam", *overrides, "--device", "cpu", "--out", str(tmp_path)])
    assert exit_.value.code == 2
    err = capsys.readouterr().err
    assert sentence in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []

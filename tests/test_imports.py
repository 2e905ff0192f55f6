"""What an import loads: the library only torch, when it is first used; the command line only what its help needs."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
import llqr

def loaded(before):
    return sorted({name.partition(".")[0] for name in set(sys.modules) - before} - {"llqr"})

found = {}
found["listed"] = set(llqr.__all__) <= set(dir(llqr)) and not hasattr(llqr, "nothing")
found["torch when it is imported"] = "torch" in sys.modules
import torch
before = set(sys.modules)
llqr.SAM
found["by SAM"] = sorted(name for name in sys.modules if name.startswith("llqr."))
from llqr import *
found["same"] = llqr.metric.Metric is llqr.Metric
import llqr.integrations.passes
found["by the library"] = loaded(before)
for module in ("app", "runs", "report", "bench", "toy"):
    __import__(f"llqr.lab.cli.{module}")
found["by the commands"] = loaded(before)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found():
    """In one fresh process: importing torch takes seconds."""
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=600)
    return json.loads(run.stdout)


def test_every_name_of_the_library_is_found_when_it_is_used(found):
    assert found["listed"]
    assert not found["torch when it is imported"]
    assert found["same"]


def test_sam_needs_no_metric_no_curvature_and_no_geometry(found):
    assert "llqr.sam" in found["by SAM"]
    unneeded = ("llqr.metric", "llqr.curvature", "llqr.geometry", "llqr.inner", "llqr.lab")
    assert not [name for name in found["by SAM"] if name.startswith(unneeded)]


def test_the_library_loads_nothing_but_itself(found):
    """No framework either, together with what the integrations share."""
    assert found["by the library"] == []


def test_commands_do_not_load_what_only_some_of_them_need(found):
    assert set(found["by the commands"]).isdisjoint({"functorch", "matplotlib", "sklearn", "tensorboard", "PIL"})
    assert "typer" in found["by the commands"]

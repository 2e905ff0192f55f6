"""What an import loads: the library only torch, when it is first used; the command line only what its help needs."""

import subprocess
import sys

PROGRAM = """
import sys
import torch
before = set(sys.modules)
{statement}
print(*sorted({{name.partition(".")[0] for name in set(sys.modules) - before}}))
"""


def loaded_besides_torch(statement):
    """The packages that ``statement`` loads in a fresh process, in addition to those of torch."""
    command = [sys.executable, "-c", PROGRAM.format(statement=statement)]
    return set(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.split())


def test_the_library_loads_nothing_but_itself():
    assert loaded_besides_torch("from llqr import *") == {"llqr"}


def test_every_name_of_the_library_is_found_when_it_is_used():
    program = """
import sys
import llqr
assert "torch" not in sys.modules
assert set(llqr.__all__) <= set(dir(llqr))
assert not hasattr(llqr, "nothing") and "torch" not in sys.modules
for name in llqr.__all__:
    getattr(llqr, name)
assert llqr.metric.Metric is llqr.Metric
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_commands_do_not_load_what_only_some_of_them_need():
    modules = ("app", "runs", "report", "bench", "toy")
    assert loaded_besides_torch("; ".join(f"import llqr.lab.cli.{module}" for module in modules)).isdisjoint(
        {"functorch", "matplotlib", "sklearn", "tensorboard", "PIL"}
    )

"""What an import loads: the library only torch, the command line nothing that is slow and not needed for its help."""

import subprocess
import sys

PROGRAM = """
import sys
import torch
before = set(sys.modules)
import {module}
print(*sorted({{name.partition(".")[0] for name in set(sys.modules) - before}}))
"""


def loaded_besides_torch(module):
    """The packages that importing ``module`` loads in a fresh process, in addition to those of torch."""
    command = [sys.executable, "-c", PROGRAM.format(module=module)]
    return set(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.split())


def test_the_library_loads_nothing_but_itself():
    assert loaded_besides_torch("llqr") == {"llqr"}


def test_the_command_line_does_not_load_what_only_some_commands_need():
    assert loaded_besides_torch("llqr.lab.cli.app").isdisjoint(
        {"functorch", "matplotlib", "sklearn", "tensorboard", "PIL"}
    )

"""How long a user waits for imports, relative to `import torch` in the same run: `pytest -m slow -s` prints it.

In seconds of computing, and the least of several: both are those of a machine that does nothing else.
"""

import resource
import subprocess
import sys

import pytest

REPEATS = 9
PROGRAMS = {
    "import torch": ["-c", "import torch"],
    "import llqr, and its names": ["-c", "import llqr; llqr.SAM, llqr.Geometry"],
    "llqr --help": ["-m", "llqr", "--help"],
}


def computed():
    """By all programs that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.slow
def test_help_takes_half_of_torch_and_the_library_next_to_nothing_more():
    seconds = {name: [] for name in PROGRAMS}
    for _ in range(REPEATS):
        for name, arguments in PROGRAMS.items():  # in turns, so that a busy machine is busy for all of them
            before = computed()
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
            seconds[name].append(computed() - before)
    times = {name: min(measured) for name, measured in seconds.items()}
    relative = {name: found / times["import torch"] for name, found in times.items()}
    for name, found in times.items():
        print(f"{name}: {found:.2f} s, {relative[name]:.2f} of import torch")
    assert relative["llqr --help"] <= 0.5
    assert relative["import llqr, and its names"] <= 1.15

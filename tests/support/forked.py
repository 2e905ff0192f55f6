"""Processes that begin with torch imported, which takes seconds: forked from one that has done nothing else."""

import multiprocessing
import os
import runpy
import sys
from pathlib import Path
from typing import NamedTuple

METHOD = "forkserver"
SECONDS = 1800  # only a program that hangs takes so long, however busy the machine is
multiprocessing.set_forkserver_preload(
    ["pytest", "torch", "torch.distributed.tensor", "torch.distributed.fsdp", "functorch.compile"]
)


class Ended(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def run(program, *arguments, folder):
    """A program, as text or as the path of a file, in ``folder`` and as if it had been started from there."""
    outputs = [folder / "stdout.txt", folder / "stderr.txt"]
    process = multiprocessing.get_context(METHOD).Process(target=_execute, args=(program, arguments, folder, outputs))
    process.start()
    process.join(SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
    return Ended(process.exitcode, *(path.read_text() for path in outputs))


def _execute(program, arguments, folder, outputs):
    os.chdir(folder)
    for descriptor, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    if isinstance(program, Path):
        sys.path.insert(0, str(program.parent))
        sys.argv = [str(program), *arguments]
        runpy.run_path(str(program), run_name="__main__")
    else:
        sys.argv = ["-c", *arguments]
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})

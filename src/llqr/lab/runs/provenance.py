"""What made a number: the commit of the package that is running, whether its files differ from it, and versions."""

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import llqr

VARIABLE = "LLQR_COMMIT"
"""Names the commit where the source is a copy without a repository. Written as `git describe --dirty` writes it: a
``-dirty`` at its end says that the copy differs from the commit."""
PACKAGE = Path(llqr.__file__).parent
PATIENCE = 10.0
"""Seconds that git may take before its answer counts as missing."""


def source_state() -> dict[str, Any]:
    """Return ``{"commit": str | None, "dirty": bool | None}``; both are None where there is no repository or no git."""
    named = os.environ.get(VARIABLE, "").strip()
    if named:
        return {"commit": named.removesuffix("-dirty"), "dirty": named.endswith("-dirty")}
    # The checkout that holds the package as src/llqr. A repository further up, such as one around the environment in
    # which the package is installed, says nothing about it.
    checkout = PACKAGE.parents[1]
    try:
        commit = _git(checkout, "rev-parse", "HEAD") if (checkout / ".git").exists() else None
        changes = _git(checkout, "status", "--porcelain", "--", str(PACKAGE)) if commit else None
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _git(checkout: Path, *arguments: str) -> str:
    command = ["git", "-C", str(checkout), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True).stdout.strip()


_maker: list[str] = []


def command() -> str:
    """What made a run: the command line, or a function that was called and the program that called it."""
    return f"{_maker[-1]} in {Path(sys.argv[0]).name}" if _maker else shlex.join(["llqr", *sys.argv[1:]])


@contextmanager
def made_by(function: str) -> Iterator[None]:
    """While entered, runs are made by this function and not by a command."""
    _maker.append(function)
    try:
        yield
    finally:
        _maker.pop()


def versions() -> dict[str, str | None]:
    return {
        "llqr": llqr.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }

"""What made a number: the command, the commit of the package that is running, versions and machine."""

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
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


def command() -> str:
    """Return the command line that is running: that of llqr, or of the program that called `llqr.lab.compare`."""
    program, *arguments = sys.argv or [""]
    name = "llqr" if Path(program).name in ("llqr", "__main__.py") else Path(program).name
    return shlex.join([name, *arguments])


def made_now(machine: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is known of a command that begins on this machine."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="milliseconds"),  # runs are shown in this order
        "command": command(),
        **source_state(),
        "versions": versions(),
        "machine": dict(machine),
    }


def versions() -> dict[str, str | None]:
    return {
        "llqr": llqr.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }

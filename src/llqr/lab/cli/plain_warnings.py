"""Warnings of a command as sentences, like its errors: no line of llqr's own code tells its user anything."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import llqr

PACKAGE = Path(llqr.__file__).parent


@contextmanager
def plain_warnings() -> Iterator[None]:
    """While entered, warnings that point into llqr are shown without that line; those of other packages as usual."""
    usual = warnings.formatwarning

    def sentence(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if Path(filename).is_relative_to(PACKAGE):
            return f"llqr: warning: {message}\n"
        return usual(message, category, filename, lineno, line)

    warnings.formatwarning = sentence
    try:
        yield
    finally:
        warnings.formatwarning = usual

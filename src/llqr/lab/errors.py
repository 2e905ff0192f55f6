"""Errors of the laboratory that are not bugs, and their exit codes."""

from llqr.lab.config.strict import ConfigurationError

DONE = 0
BAD_ARGUMENTS = 2
BAD_DATA = 3
DIVERGED = 4
STOPPED = 75  # EX_TEMPFAIL of sysexits.h: the same command resumes from the checkpoint


class DataError(RuntimeError):
    """A data set, a checkpoint or a run file that is missing or damaged."""


class Diverged(RuntimeError):
    """The training loss is no longer finite, or too many refreshes in a row were rejected."""


class Stopped(RuntimeError):
    """A signal or the time limit ended the command early; a checkpoint holds the state."""


EXIT_CODES: dict[type[Exception], int] = {
    ConfigurationError: BAD_ARGUMENTS,
    DataError: BAD_DATA,
    Diverged: DIVERGED,
    Stopped: STOPPED,
}

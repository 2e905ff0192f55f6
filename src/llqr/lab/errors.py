"""Errors of the laboratory that are not bugs, and their exit codes."""


class ConfigurationError(ValueError):
    """A configuration that cannot be used; the message names the key and the file it is in."""


class DataError(RuntimeError):
    """A data set, a checkpoint or a run file that is missing or damaged."""


class Diverged(RuntimeError):
    """The training loss is no longer finite, or too many refreshes in a row were rejected."""


class CannotWrite(RuntimeError):
    """A folder or a file that results should go to is not writable, or its disk is full."""


class RunsFailed(RuntimeError):
    """Some of the runs that were carried out side by side failed; the others are done."""


class Stopped(RuntimeError):
    """A signal or the time limit ended the command early; a checkpoint holds the state."""


class Interrupted(RuntimeError):
    """Ctrl-C ended the command at once."""


EXIT_CODES: dict[type[Exception], int] = {
    RunsFailed: 1,
    ConfigurationError: 2,
    DataError: 3,
    Diverged: 4,
    CannotWrite: 73,  # EX_CANTCREAT of sysexits.h
    Stopped: 75,  # EX_TEMPFAIL: the same command resumes from the checkpoint
    Interrupted: 130,  # as shells report a process that SIGINT ended
}

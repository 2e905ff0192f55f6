"""What can go wrong in the laboratory without being a bug, and the exit code a shell script sees for it."""

from llqr.lab.config.strict import ConfigurationError

DONE = 0
BAD_ARGUMENTS = 2
BAD_DATA = 3
DIVERGED = 4
STOPPED = 75  # EX_TEMPFAIL of sysexits.h: the same command goes on from the checkpoint


class DataError(RuntimeError):
    """A data set, a checkpoint or a run file that is missing or damaged."""


class Diverged(RuntimeError):
    """The training loss is no longer a number, or the metric could not be learned many times in a row."""


class Stopped(RuntimeError):
    """A signal or the time limit ended the command early; a checkpoint holds what was done."""


EXIT_CODES: dict[type[Exception], int] = {
    ConfigurationError: BAD_ARGUMENTS,
    DataError: BAD_DATA,
    Diverged: DIVERGED,
    Stopped: STOPPED,
}

"""The command line as a function."""

import pytest

from llqr.lab.cli.app import main
from llqr.lab.tasks import Task


@pytest.fixture
def llqr(capsys, tmp_path, monkeypatch):
    """Runs a command in an empty folder: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        with pytest.raises(SystemExit) as exit_:
            main(list(arguments))
        return exit_.value.code, *capsys.readouterr()

    return run


@pytest.fixture(scope="session", autouse=True)
def _few_samples_are_measured():
    """The sharpness of solutions is most of what a comparison of small networks takes; two pieces of a batch do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Task, "samples_measured", 96)
        yield

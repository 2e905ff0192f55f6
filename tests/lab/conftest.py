"""The command line as a function."""

import pytest

from llqr.lab.cli.app import main


@pytest.fixture
def llqr(capsys, tmp_path, monkeypatch):
    """Runs a command in an empty folder: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        with pytest.raises(SystemExit) as exit_:
            main(list(arguments))
        return exit_.value.code, *capsys.readouterr()

    return run

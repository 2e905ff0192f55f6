"""What happens before a command runs: help without torch."""

import subprocess
import sys

import pytest
import typer

from llqr.lab.cli.app import COMMANDS, app


def test_every_command_that_is_listed_can_be_loaded():
    group = typer.main.get_command(app)
    context = group.make_context("llqr", ["--help"], resilient_parsing=True)
    for name in COMMANDS:
        _, command, _ = group.resolve_command(context, [name])
        assert command.help, name


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], [], ["trian"]])
def test_help_does_not_wait_for_torch(arguments):
    program = f"""
import sys
from llqr.__main__ import main
sys.argv = ["llqr", *{arguments!r}]
try:
    main()
except SystemExit:
    sys.exit("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)


def test_ctrl_c_in_a_command_is_exit_code_130(llqr, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("llqr.lab.results.storage.rows", interrupt)
    assert llqr("storage") == (130, "", "llqr: interrupted.\n")

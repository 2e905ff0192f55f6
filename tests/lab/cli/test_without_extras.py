"""Installed without extras there is the command too: it must say what is missing instead of dying."""

import pytest

import forked

BLOCKED = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == {package!r} or name.startswith({package!r} + "."):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
sys.argv = ["llqr", {command!r}]
"""
MAIN = "from llqr.__main__ import main\nmain()\n"


def run_without(package, folder, program=MAIN, command="recipes"):
    return forked.run(BLOCKED.format(package=package, command=command) + program, folder=folder)


@pytest.mark.parametrize(("package", "command"), [("typer", "recipes"), ("rich", "recipes"), ("pandas", "report")])
def test_a_missing_package_is_one_sentence_and_exit_code_2(package, command, tmp_path):
    done = run_without(package, tmp_path, command=command)
    assert done.returncode == 2
    assert done.stderr == f'llqr: the command line needs {package}: pip install ".[lab]" in a clone\n'
    assert not done.stdout


def test_the_library_itself_needs_none_of_them(tmp_path):
    done = run_without("typer", tmp_path, "import llqr; llqr.SAM")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_missing_module_of_our_own_is_an_error_with_its_traceback(tmp_path):
    done = run_without("llqr.lab.cli.app", tmp_path)
    assert done.returncode == 1
    assert "Traceback" in done.stderr

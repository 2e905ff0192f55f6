"""`pip install llqr` without extras installs the command too: it must say what is missing instead of dying."""

import subprocess
import sys

import pytest

BLOCKED = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
sys.argv = ["llqr", "recipes"]
from llqr.__main__ import main
main()
"""


@pytest.mark.parametrize("package", ["typer", "rich", "jinja2"])
def test_a_missing_package_is_one_sentence_and_exit_code_2(package):
    done = subprocess.run([sys.executable, "-c", BLOCKED.format(package=package)], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == f'llqr: the command line needs {package}: pip install "llqr[lab]"\n'
    assert not done.stdout


def test_the_library_itself_needs_none_of_them():
    blocked = BLOCKED.format(package="typer").replace("from llqr.__main__ import main\nmain()", "import llqr")
    done = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_missing_module_of_our_own_is_an_error_with_its_traceback():
    blocked = (
        BLOCKED.format(package="typer").replace('name.partition(".")[0]', "name").replace("typer", "llqr.lab.cli.app")
    )
    done = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True)
    assert done.returncode == 1
    assert "Traceback" in done.stderr

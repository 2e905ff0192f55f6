"""What happens before a command runs: help without torch, Ctrl-C during imports, completion in the shell."""

import signal
import subprocess
import sys

import pytest
import typer

from llqr.lab.cli.app import Commands, app

INTERRUPTED_AT = """
import os, signal, sys

class CtrlC:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, CtrlC())
sys.argv = ["llqr", "recipes"]
from llqr.__main__ import main
main()
"""


def test_the_list_of_commands_is_that_of_the_commands_themselves():
    group = typer.main.get_command(app)
    for name, (_, summary) in Commands.LAZY.items():
        assert group.load(name).help.partition("\n\n")[0].replace("\n", " ") == summary, name


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


@pytest.mark.parametrize("module", ["typer", "torch.nn.modules.linear"])
def test_ctrl_c_while_modules_are_imported_ends_the_command(module):
    program = INTERRUPTED_AT.format(module=module)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr, done.stdout) == (130, "llqr: interrupted.\n", "")


def test_ctrl_c_in_a_command_is_exit_code_130(llqr, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("llqr.lab.results.storage.rows", interrupt)
    assert llqr("storage") == (130, "", "llqr: interrupted.\n")


@pytest.mark.parametrize("dropped", [False, True])
def test_ctrl_c_that_a_package_renames_or_drops_is_still_exit_code_130(llqr, monkeypatch, dropped):
    def rename(*arguments):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            if not dropped:
                raise TypeError("incompatible arguments") from None
        return []

    monkeypatch.setattr("llqr.lab.results.storage.rows", rename)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code, _, err = llqr("storage")
        assert (code, err) == (130, "llqr: interrupted.\n")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("llqr re", "reproduce report results recipes"),
        ("llqr train digits/", "digits/mlp digits/mlp-clean digits/mlp-noisy"),
        ("llqr train cifar100/resnet18@s", "cifar100/resnet18@short"),
        ("llqr train digits/mlp --method llqr-ngd+", "llqr-ngd+fsam llqr-ngd+sam"),
        ("llqr compare digits/mlp --methods sam,llqr-ngd+", "sam,llqr-ngd+fsam sam,llqr-ngd+sam"),
        ("llqr compare unknown --methods s", ""),
        ("llqr compare digits/mlp --model resnet1", "resnet18"),
        ("llqr reproduce label", "label-noise"),
    ],
)
def test_the_shell_completes_commands_and_names(llqr, monkeypatch, line, offered):
    words = line.split()
    monkeypatch.setattr(sys, "argv", ["llqr"])
    for name, value in {"_LLQR_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": len(words) - 1}.items():
        monkeypatch.setenv(name, str(value))
    assert llqr() == (0, "\n".join(offered.split()) + "\n", "")

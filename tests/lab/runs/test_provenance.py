"""Every measured number names the source that made it."""

import subprocess
from pathlib import Path

import pytest

from llqr.lab.runs import provenance


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository that holds the package as src/llqr, with one commit."""
    monkeypatch.delenv(provenance.VARIABLE, raising=False)
    package = tmp_path / "src/llqr"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    monkeypatch.setattr(provenance, "PACKAGE", package)
    return tmp_path


def test_the_commit_of_the_checkout_is_named(checkout: Path) -> None:
    assert provenance.source_state() == {"commit": git(checkout, "rev-parse", "HEAD"), "dirty": False}


@pytest.mark.parametrize("name", ["__init__.py", "new.py"])
def test_a_changed_or_a_new_source_file_makes_it_dirty(checkout: Path, name: str) -> None:
    (checkout / "src/llqr" / name).write_text("x = 1\n")

    assert provenance.source_state()["dirty"] is True


def test_a_changed_file_outside_the_package_does_not(checkout: Path) -> None:
    (checkout / "results.jsonl").write_text("{}\n")

    assert provenance.source_state()["dirty"] is False


def test_outside_a_checkout_nothing_is_claimed_even_inside_another_repository(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "PACKAGE", checkout / ".venv/lib/site-packages/llqr")

    assert provenance.source_state() == {"commit": None, "dirty": None}


def test_a_missing_git_is_no_error(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(checkout))

    assert provenance.source_state() == {"commit": None, "dirty": None}


@pytest.mark.parametrize(("named", "dirty"), [("0123abc", False), ("0123abc-dirty", True)])
def test_a_copy_without_a_repository_is_told_its_commit(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, named: str, dirty: bool
) -> None:
    monkeypatch.setenv(provenance.VARIABLE, named)

    assert provenance.source_state() == {"commit": "0123abc", "dirty": dirty}

"""What a user installs: wheel and sdist, in fresh environments, without the repository and without a network."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import llqr

ROOT = Path(__file__).parent.parent
FIRST_STEP = """
import torch, llqr
model = torch.nn.Linear(3, 2)
geometry = llqr.Geometry(model, torch.nn.functional.cross_entropy, every=2)
opt = llqr.LLQRSAM(torch.optim.SGD(model.parameters(), lr=0.1), geometry, rho=0.05)
x, y = torch.randn(8, 3), torch.randint(2, (8,))
def closure():
    opt.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    return loss
for _ in range(3):
    opt.step(closure, batch=(x, y))
print(llqr.__version__, llqr.__file__)
"""


def test_the_version_is_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (cited,) = re.findall(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), flags=re.M)
    assert project["version"] == cited == llqr.__version__
    assert f"## {cited} " in (ROOT / "CHANGELOG.md").read_text()


def test_the_citation_names_the_authors_that_the_readme_names():
    cited = re.findall(r"family-names: (\S+)", (ROOT / "CITATION.cff").read_text())
    (named,) = re.findall(r"Minimization\* \((.*?), 2026\)", (ROOT / "README.md").read_text(), flags=re.S)
    assert cited == re.split(r",\s+", named)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist of this tree, and the wheel that is built from the sdist."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build"]
    subprocess.run([*build, "-t", "sdist", "-d", folder], cwd=ROOT, check=True, capture_output=True)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    subprocess.run([*build, "-t", "wheel", "-d", folder], cwd=source, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return sdist, wheel


def required(*names):
    """These distributions and all that they need, without extras."""
    from packaging.requirements import Requirement

    found, waiting = {}, list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        found[name] = metadata.distribution(name)
        needed = map(Requirement, found[name].requires or ())
        waiting += [one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    return list(found.values())


class Environment:
    """A fresh virtual environment with the wheel in it."""

    def __init__(self, folder, wheel):
        venv.create(folder, with_pip=False)
        self.bin = folder / "bin"
        (self.packages,) = folder.glob("lib/python*/site-packages")
        pip = [sys.executable, "-m", "pip", "--python", self.bin / "python", "install", "-q", "--no-deps", "--no-index"]
        subprocess.run([*pip, wheel], check=True, capture_output=True)

    def link(self, distributions):
        """Let the environment see these distributions of ours, and no others."""
        for one in distributions:
            for top in {file.parts[0] for file in one.files or () if file.parts[0] not in ("..", "__pycache__")}:
                if not (self.packages / top).exists():
                    (self.packages / top).symlink_to(one.locate_file(top))

    def run(self, *command, cwd):
        kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        command = [self.bin / command[0], *command[1:]]
        return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=kept, timeout=300)


@pytest.mark.slow
def test_the_archives_hold_what_they_should(built):
    sdist, wheel = built
    files = set(zipfile.ZipFile(wheel).namelist())
    source = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src/llqr").rglob("*") if path.is_file()}
    source = {name for name in source if "__pycache__" not in name}
    assert {name for name in files if ".dist-info/" not in name} == source
    with tarfile.open(sdist) as archive:
        tops = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    assert {"src", "tests", "docs", "results", "examples", "LICENSE", "CITATION.cff", "SECURITY.md", "Makefile"} <= tops
    assert tops.isdisjoint({".ci", "runs", "site", ".venv", "dist"})


@pytest.mark.slow
def test_without_extras_it_is_the_optimizer_and_the_command_says_what_to_install(built, tmp_path):
    bare = Environment(tmp_path / "bare", built[1])
    bare.link(required("torch", "numpy"))
    done = bare.run("python", "-c", FIRST_STEP, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    version, place = done.stdout.split()
    assert version == llqr.__version__
    assert Path(place).is_relative_to(tmp_path / "bare")
    done = bare.run("llqr", "recipes", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r'llqr: the command line needs \w+: pip install "\.\[lab\]" in a clone\n', done.stderr)


@pytest.mark.slow
def test_with_the_laboratory_the_command_works_from_the_wheel(built, tmp_path):
    whole = Environment(tmp_path / "whole", built[1])
    (whole.packages / "ours.pth").write_text(sysconfig.get_path("purelib"))
    assert whole.run("llqr", "--version", cwd=tmp_path).stdout.split() == [llqr.__version__]
    assert "digits/mlp" in whole.run("llqr", "recipes", cwd=tmp_path).stdout.splitlines()
    short = ["--methods", "sgdm,llqr+sam", "--seeds", "1", "--set", "training.epochs=1", "--quiet", "--out", "runs"]
    done = whole.run("llqr", "compare", "digits/mlp", *short, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the best accuracy" in (tmp_path / "runs/report.html").read_text()
    done = whole.run(
        "llqr", "table", "cifar100", "--plot", "table.svg", "--results", str(ROOT / "results"), cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "table.svg").exists()

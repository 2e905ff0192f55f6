"""The documentation runs: every python block of every page on its own, every docstring example, every public name."""

import doctest
import importlib
import json
import pkgutil
import re
from pathlib import Path

import pytest

import llqr
import tiny_text

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]


def _blocks():
    for page in PAGES:
        text = (ROOT / page).read_text()
        for match in re.finditer(r"^```python\n(.*?)^```", text, flags=re.S | re.M):
            line = text.count("\n", 0, match.start()) + 2
            yield pytest.param(page, line, match[1], id=f"{page}:{line}")


@pytest.mark.parametrize(("page", "line", "block"), list(_blocks()))
def test_a_block_runs_alone(page, line, block, tmp_path, monkeypatch):
    """In an empty folder, which for the page on text holds prepared text under the names that it uses."""
    monkeypatch.chdir(tmp_path)
    for framework in re.findall(r"^from (lightning|transformers|accelerate)\b", block, flags=re.M):
        pytest.importorskip(framework)
    if page == "docs/text.md":
        tiny_text.reversal(tmp_path / "data", "europarl")
        tiny_text.counting(tmp_path / "data", "novels")
    exec(compile("\n" * (line - 1) + block, page, "exec"), {"__name__": "block"})


def _modules():
    names = [info.name for info in pkgutil.walk_packages(llqr.__path__, "llqr.")]
    return [name for name in names if not name.startswith(("llqr.lab", "llqr.__main__"))]


@pytest.mark.parametrize("name", _modules())
def test_docstring_examples(name):
    if name.startswith("llqr.integrations."):
        framework = name.rpartition(".")[2]
        if framework in ("accelerate", "lightning", "transformers"):
            pytest.importorskip(framework)
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


def test_what_is_public_has_an_example():
    """Base classes refer to their subclasses' examples; exceptions and registries need none."""
    exempt = {"Stacked", "Flat", "RefreshError", "RefreshWarning", "STRUCTURES", "ENGINES", "SOLVERS", "PROBES"}
    bare = [name for name in llqr.__all__ if name not in exempt and ">>>" not in (getattr(llqr, name).__doc__ or "")]
    assert not bare


@pytest.mark.parametrize("package", ["llqr", "llqr.lqr", "llqr.theory"])
def test_the_api_pages_show_everything_public(package):
    shown = set()
    for page in (ROOT / "docs/api").glob("*.md"):
        shown |= set(re.findall(r"^::: (\S+)$", page.read_text(), flags=re.M))
    public = importlib.import_module(package).__all__
    # A function of the same name as its module is shown by its full path.
    assert not [name for name in public if shown.isdisjoint({f"{package}.{name}", f"{package}.{name}.{name}"})]


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_to_files_lead_somewhere(page):
    """`make docs` checks the anchors too, but only of the site."""
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)[^)]*\)", (ROOT / page).read_text())
    assert not [link for link in links if not ((ROOT / page).parent / link).exists()]


@pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/bench.md"])
def test_a_page_is_short(page):
    """About 1,500 words, which is what a reader has patience for; tables that are generated do not count."""
    text = re.sub(r"<!-- table:.*?<!-- /table -->", "", (ROOT / page).read_text(), flags=re.S)
    assert len(text.split()) <= 1500


def _bench(name, **wanted):
    """The row of a kept measurement that has these values."""
    rows = json.loads((ROOT / f"results/bench/{name}.json").read_text())["rows"]
    (row,) = (row for row in rows if all(row[key] == value for key, value in wanted.items()))
    return row


@pytest.mark.parametrize(
    ("label", "file", "model", "structure"),
    [
        ("ResNet-18 (CIFAR)", "cadence-resnet18-every-5", "resnet18", "diagonal"),
        ("ViT-B/16", "cadence-vit-every-5", "vit-b", "e-kfac"),
        ("ViT-L/16", "cadence-vit-every-5", "vit-l", "e-kfac"),
    ],
)
def test_costs_are_those_measured(label, file, model, structure):
    sam = _bench(file, model=model, method="SAM")["vs_sgd"]["median"]
    llqr_alone = _bench(file, model=model, method="LLQR", interval=500)["vs_sgd"]["median"]
    both = _bench(file, model=model, method="LLQR+SAM", interval=500)
    over_sam, refresh = both["vs_sam"]["median"], both["refresh_seconds"]["median"]
    start = f"| {label} | {structure} | {sam:.2f} | "
    assert f"{start}{over_sam:.2f} | {refresh:.2f} s |" in (ROOT / "docs/index.md").read_text()
    assert f"{over_sam:.2f}" in (ROOT / "README.md").read_text()
    assert f"{start}{llqr_alone:.2f} | {over_sam:.2f} | {refresh:.2f} s |" in (ROOT / "docs/choose.md").read_text()


@pytest.mark.parametrize(
    ("file", "model", "pages"),
    [
        ("cadence-resnet18-e-kfac", "resnet18", ("README.md", "docs/index.md", "docs/choose.md")),
        ("cadence-resnet18-e-kfac-one-sided", "resnet18", ("README.md", "docs/index.md", "docs/choose.md")),
        ("cadence-resnet18-e-kfac-channels", "resnet18", ("docs/index.md", "docs/choose.md")),
        ("cadence-vit-b-one-sided", "vit-b", ("README.md", "docs/index.md", "docs/choose.md")),
    ],
)
def test_costs_of_the_forms_of_ekfac_are_those_measured(file, model, pages):
    over_sam = _bench(file, model=model, method="LLQR+SAM", interval=500)["vs_sam"]["median"]
    for page in pages:
        assert f"{over_sam:.2f}" in (ROOT / page).read_text()


def test_the_cost_of_ekfac_on_resnet18_is_that_of_the_runs():
    runs = [json.loads(line) for line in (ROOT / "results/cifar100.jsonl").read_text().splitlines()]
    seconds = {
        (run["run"]["method"], (run["run"]["geometry"] or {}).get("structure")): run["result"]["epoch_seconds"]
        for run in runs
        if run["seed"] == 0
    }
    both, sam = seconds["llqr-ngd+sam", "e-kfac"], seconds["sam", None]
    for page in ("README.md", "docs/index.md", "docs/choose.md"):
        assert f"{both / sam:.2f}" in (ROOT / page).read_text()
    assert f"({both:.2f} s against {sam:.2f} s)" in (ROOT / "docs/index.md").read_text()


@pytest.mark.parametrize(
    ("label", "model", "structure"), [("ResNet-18 (CIFAR)", "resnet18", "diagonal"), ("ViT-B/16", "vit-b", "e-kfac")]
)
def test_memory_is_that_measured(label, model, structure):
    step = _bench(f"memory-{model}", what="LLQR+SAM", structure=structure)
    refresh = _bench(f"memory-{model}", what="refresh", structure=structure)
    factors = f"{step['metric_bytes'] / 2**20:.0f} MiB"
    row = f"| {label} | {structure} | {factors} | {step['vs_sam']:.2f} | {refresh['vs_sam']:.2f} |"
    assert row in (ROOT / "docs/choose.md").read_text()


def test_the_counts_of_the_soak_are_those_kept():
    kept = {path.stem: json.loads(path.read_text())["counts"] for path in (ROOT / "results/soak").glob("*.json")}
    text = " ".join((ROOT / "docs/loops.md").read_text().split())
    assert f"all {kept['random-failures']['retries compared']:,} retries" in text
    for name in ("random-failures", "random-failures-in-captured-refreshes", "random-failures-on-two-ranks"):
        assert f"{kept[name]['failures']:,}" in text
        assert not any(count for what, count in kept[name].items() if "changed" in what or "differ" in what)
    assert f"{kept['SIGKILLs']['kills']} SIGKILLs" in text
    assert kept["SIGKILLs"]["runs that differ"] == 0

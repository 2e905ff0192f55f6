"""The documentation runs: every python block of every page on its own, every docstring example, every public name."""

import doctest
import html
import importlib
import importlib.util
import json
import pkgutil
import re
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import llqr
import tiny_text
from llqr.lab.config import recipe
from llqr.lab.results import against, build_table, measurements, summary
from llqr.lab.runs.planned import describe, plan
from processes import one_rank

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
    """In an empty folder, which for the page on text holds prepared text under the names that it uses.

    Those of the page on several devices are the only rank that torchrun has started.
    """
    monkeypatch.chdir(tmp_path)
    if page == "docs/distributed.md":
        for name, value in one_rank().items():
            monkeypatch.setenv(name, value)
    for framework in re.findall(r"^from (lightning|transformers|accelerate)\b", block, flags=re.M):
        pytest.importorskip(framework)
    if page == "docs/text.md":
        tiny_text.reversal(tmp_path / "data", "europarl")
        tiny_text.counting(tmp_path / "data", "novels")
    try:
        exec(compile("\n" * (line - 1) + block, page, "exec"), {"__name__": "block"})
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


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
    text = (ROOT / page).read_text()
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)[^)]*\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    assert not [link for link in links if not ((ROOT / page).parent / link).exists()]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_short(page):
    """About 1,500 words, which is what a reader has patience for; tables that are generated do not count."""
    text = re.sub(r"<!-- table:.*?<!-- /table -->", "", (ROOT / page).read_text(), flags=re.S)
    assert len(text.split()) <= 1500


def _rows(name):
    return json.loads((ROOT / f"results/bench/{name}.json").read_text())["rows"]


def _bench(name, **wanted):
    """The row of a kept measurement that has these values."""
    (row,) = (row for row in _rows(name) if all(row[key] == value for key, value in wanted.items()))
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
        ("cadence-resnet18-e-kfac-one-sided", "resnet18", ("docs/index.md", "docs/choose.md")),
        ("cadence-resnet18-e-kfac-channels", "resnet18", ("docs/index.md", "docs/choose.md")),
        ("cadence-resnet18-one-sided-bf16", "resnet18", ("docs/index.md", "docs/choose.md")),
        ("cadence-resnet18-side-2304", "resnet18", ("README.md", "docs/index.md", "docs/choose.md")),
        ("cadence-vit-b-one-sided", "vit-b", ("README.md", "docs/index.md", "docs/choose.md")),
        ("cadence-vit-l-one-sided", "vit-l", ("README.md", "docs/index.md", "docs/choose.md")),
    ],
)
def test_costs_of_the_forms_of_ekfac_are_those_measured(file, model, pages):
    over_sam = _bench(file, model=model, method="LLQR+SAM", interval=500)["vs_sam"]["median"]
    for page in pages:
        assert f"{over_sam:.2f}" in (ROOT / page).read_text()


def _plain_text(page):
    return " ".join((ROOT / page).read_text().replace("**", "").split())


def _against(table, row, method):
    built = build_table.build(table, measurements.read(ROOT / "results"))
    return {one.method: one for one in against.compare(built, method) if one.row == row}


GAINS = [
    ("ResNet-18, 200 epochs, radius 0.1", "cifar100@rho-0.1", "resnet18", "sam", "llqr-ngd+sam"),
    ("the same, SAM with 0.2, its better radius", "cifar100", "resnet18", "sam", "llqr-ngd+sam"),
    ("the same, both with 0.2, a basis for every side", "cifar100@rho-0.2", "resnet18", "sam", "llqr-ngd+sam"),
    ("VGG16-BN, 200 epochs, radii as in the second row", "cifar100", "vgg16-bn", "sam", "llqr-ngd+sam"),
    ("ResNet-18, 60 epochs, radius 0.1", "metric-ablation@side-2304", "resnet18", "sam-rho-0.1", "side-2304+sam"),
    ("60 % wrong labels, 60 epochs, radius 0.1", "label-noise@60-epochs-rho-0.1", "0.6", "sam", "llqr-ngd+sam"),
    ("the same, radius 0.05", "label-noise@60-epochs-rho-0.05", "0.6", "sam", "llqr-ngd+sam"),
    ("Europarl, German to English, AdamW: BLEU", "iwslt14", "europarl-de-en", "sam", "llqr-ngd+sam"),
]


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
@pytest.mark.parametrize(("label", "table", "row", "sam", "both"), GAINS)
def test_gains_are_those_of_the_tables(page, label, table, row, sam, both):
    found = _against(table, row, sam)
    seeds = dict.fromkeys(str(found[method].measured.n) for method in (sam, both))
    _, _, difference, p = found[both].texts()
    cells = [label, found[sam].measured, found[both].measured, difference, p, " and ".join(seeds)]
    assert "| " + " | ".join(map(str, cells)).replace("|  |", "| |") + " |" in (ROOT / page).read_text()


def test_the_gain_that_helps_to_choose_is_that_of_the_tables():
    text = _plain_text("docs/choose.md")
    for table in ("cifar100@rho-0.1", "cifar100"):
        rows = _against(table, "resnet18", "sam")
        gain = rows["llqr-ngd+sam"]
        assert f"{gain.difference:+.2f}, p = {gain.p:.1g}" in text
        assert all(f"{rows[method].measured}" in text for method in ("sam", "llqr-ngd+sam"))


def test_the_cost_of_ekfac_on_resnet18_is_that_of_the_runs():
    runs = [json.loads(line) for line in (ROOT / "results/cifar100.jsonl").read_text().splitlines()]
    seconds = {
        (run["run"]["method"], (run["run"]["geometry"] or {}).get("structure")): run["result"]["epoch_seconds"]
        for run in runs
        if run["seed"] == 0 and run["recipe"] == "cifar100/resnet18"
    }
    both, sam = seconds["llqr-ngd+sam", "e-kfac"], seconds["sam", None]
    assert f"{both / sam:.2f}" in (ROOT / "docs/choose.md").read_text()


@pytest.mark.parametrize(
    ("label", "model", "structure"), [("ResNet-18 (CIFAR)", "resnet18", "diagonal"), ("ViT-B/16", "vit-b", "e-kfac")]
)
def test_memory_is_that_measured(label, model, structure):
    step = _bench(f"memory-{model}", what="LLQR+SAM", structure=structure)
    refresh = _bench(f"memory-{model}", what="refresh", structure=structure)
    factors = f"{step['metric_bytes'] / 2**20:.0f} MiB"
    row = f"| {label} | {structure} | {factors} | {step['vs_sam']:.2f} | {refresh['vs_sam']:.2f} |"
    assert row in (ROOT / "docs/choose.md").read_text()


def test_the_memory_of_channels_is_that_of_the_runs(tmp_path):
    """Beside the metric of the recipes, in the runs whose gains are compared."""
    name, methods = "metric-ablation/resnet18@side-2304", ["channels+sam", "side-2304+sam"]
    runs = describe(plan(name, recipe.load(name), methods, [0], tmp_path))
    few, many = (f"{run['metric_bytes'] / 2**20:.0f}" for run in runs)
    assert f"{few} MiB on ResNet-18 instead of {many}" in (ROOT / "docs/choose.md").read_text()


def test_the_time_of_the_ablation_is_that_measured():
    """Its runs refresh more often than the epochs whose cost is quoted elsewhere."""
    name = "metric-ablation/resnet18@side-2304"
    run = recipe.load(name).run("side-2304+sam", name)
    both, sam = (
        _bench("cadence-resnet18-side-2304", method=method, interval=interval)
        for method, interval in (("LLQR+SAM", 500), ("SAM", None))
    )
    step = both["step_seconds"]["median"] + both["refresh_seconds"]["median"] / run.geometry.every
    epochs = run.training.epochs * step / sam["step_seconds"]["median"]
    said = f"with a refresh every {run.geometry.every} steps, take the time of {epochs:.0f}"
    assert said in _plain_text("docs/gain.md")
    for page in ("README.md", "docs/index.md"):
        assert f"and {epochs / run.training.epochs:.2f} in the runs of 60 epochs" in _plain_text(page)


def test_what_normalise_did_is_what_its_curve_shows():
    """`g.Ug / g.g` of every refresh, from the change `|Ug - g| / |g|` and the cosine between them."""
    lines = (ROOT / "results/curves/metric-ablation-resnet18@side-2304-seed0.jsonl").read_text().splitlines()
    (run,) = (run for run in map(json.loads, lines) if run["run"]["method"] == "normalise+sam")
    pairs = zip(run["refresh_change"], run["refresh_cosine"], strict=True)
    along = [cosine * (cosine + (cosine**2 - 1 + change**2) ** 0.5) for change, cosine in pairs]
    for page in ("docs/gain.md", "results/protocol.md"):
        text, cosine = " ".join((ROOT / page).read_text().split()), run["refresh_cosine"][-1]
        assert f"{min(along):.3f} to {max(along):.3f} times" in text
        assert f"with a cosine of {cosine:.2f}" in text
        assert f"gradients {along[-1] / cosine:.1f} times as long" in text


def test_what_the_metric_did_in_translation_is_what_its_curves_show():
    lines = (ROOT / "results/curves/iwslt14-europarl-de-en-seed0.jsonl").read_text().splitlines()
    last = {f"{run['refresh_change'][-1]:.2f}" for run in map(json.loads, lines)}
    assert len(lines) == 2
    assert last == set(re.findall(r"changes a gradient by (\S+) at the end", _plain_text("docs/gain.md")))


def _percent_over_sam(file, model):
    return round(100 * (_bench(file, model=model, method="LLQR+SAM", interval=500)["vs_sam"]["median"] - 1))


def test_the_short_answers_on_speed_are_those_measured():
    text = (ROOT / "docs/bench.md").read_text()
    base, large = (_percent_over_sam("cadence-vit-every-5", model) for model in ("vit-b", "vit-l"))
    assert f"{base} % of an epoch on ViT-B/16 and {large} % on ViT-L/16" in text
    forms = [
        _percent_over_sam(f"cadence-resnet18-{form}", "resnet18") for form in ("every-5", "e-kfac", "e-kfac-one-sided")
    ]
    assert "{} % with a diagonal, {} % with e-kfac, {} % with one-sided e-kfac".format(*forms) in text
    seconds = [
        _bench("cadence-vit-every-5", model=model, method="LLQR+SAM", interval=500)["refresh_seconds"]["median"]
        for model in ("vit-b", "vit-l")
    ]
    assert "{:.2f} s on ViT-B/16, {:.2f} s on ViT-L/16".format(*seconds) in text
    step = _bench("memory-vit-b", what="LLQR+SAM", structure="e-kfac")["vs_sam"]
    refresh = _bench("memory-vit-b", what="refresh", structure="e-kfac")["vs_sam"]
    assert f"{100 * (step - 1):.0f} % more than SAM in a step with e-kfac on ViT-B/16, {refresh:.1f} times" in text
    errors = [row["errors"]["Ug"] for name in ("refresh-vit-b", "refresh-vit-b-few") for row in _rows(name)]
    assert f"off by {100 * min(errors):.1f} to {100 * max(errors):.1f} %" in text


def test_no_page_needs_a_server_to_be_seen():
    """Diagrams are pictures, not scripts that a browser would fetch."""
    assert not [page for page in PAGES if "```mermaid" in (ROOT / page).read_text()]


def _script(name):
    spec = importlib.util.spec_from_file_location(f"figure_{name}", ROOT / f"docs/figures/{name}.py")
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script  # its dataclasses look their module up
    spec.loader.exec_module(script)
    return script


def test_the_diagrams_are_those_that_the_script_draws():
    """If this fails, run `make figures`."""
    script = _script("diagrams")
    for name, drawn in script.DIAGRAMS.items():
        assert (ROOT / f"docs/figures/architecture-{name}.svg").read_text() == script.diagram(*drawn)


def test_the_picture_of_the_terminal_shows_the_kept_runs_of_the_demo():
    """If this fails, run `make figures`."""
    shown = html.unescape(re.sub(r"<[^>]*>", " ", (ROOT / "docs/figures/terminal.svg").read_text())).replace(
        "\xa0", " "
    )
    runs = [json.loads(line)["result"] for line in (ROOT / "results/demo/digits.jsonl").read_text().splitlines()]
    for one in summary.summarise(runs):
        assert f"{one.best_mean:.2f} ± {one.best_std:.2f}" in shown
    assert "http" not in (ROOT / "docs/figures/terminal.svg").read_text().replace("http://www.w3.org/2000/svg", "")


def test_the_counts_of_the_soak_are_those_kept():
    kept = {path.stem: json.loads(path.read_text())["counts"] for path in (ROOT / "results/soak").glob("*.json")}
    text = " ".join((ROOT / "docs/loops.md").read_text().split())
    assert f"all {kept['random-failures']['retries compared']:,} retries" in text
    for name in ("random-failures", "random-failures-in-captured-refreshes", "random-failures-on-two-ranks"):
        assert f"{kept[name]['failures']:,}" in text
        assert not any(count for what, count in kept[name].items() if "changed" in what or "differ" in what)
    assert f"{kept['SIGKILLs']['kills']} SIGKILLs" in text
    assert kept["SIGKILLs"]["runs that differ"] == 0

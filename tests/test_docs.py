"""The documentation runs: every python block of every page on its own, every docstring example, every public name."""

import doctest
import html
import importlib
import json
import pkgutil
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from scipy.stats import ttest_ind

import llqr
from llqr.lab.config import recipe
from llqr.lab.results import measurements, summary, tables
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
    """In an empty folder; those of the page on several devices as the only rank that torchrun has started."""
    monkeypatch.chdir(tmp_path)
    if page == "docs/distributed.md":
        for name, value in one_rank().items():
            monkeypatch.setenv(name, value)
    for framework in re.findall(r"^from (lightning|transformers|accelerate)\b", block, flags=re.M):
        pytest.importorskip(framework)
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
    exempt = {"Flat", "RefreshError", "RefreshWarning", "STRUCTURES", "ENGINES", "SOLVERS", "PROBES"}
    bare = [name for name in llqr.__all__ if name not in exempt and ">>>" not in (getattr(llqr, name).__doc__ or "")]
    assert not bare


def shown_by_the_api_pages() -> list:
    pages = [page.read_text() for page in (ROOT / "docs/api").glob("*.md")]
    return [pkgutil.resolve_name(name) for page in pages for name in re.findall(r"^::: (\S+)$", page, flags=re.M)]


@pytest.mark.parametrize("package", ["llqr", "llqr.lab", "llqr.lqr", "llqr.theory"])
def test_the_api_pages_show_everything_public(package):
    module, shown = importlib.import_module(package), shown_by_the_api_pages()
    assert not [name for name in module.__all__ if not any(getattr(module, name) is one for one in shown)]


def test_the_api_pages_show_what_the_other_pages_import():
    """What an extension or a framework needs of the library's parts; the laboratory's toys have pages of their own."""
    text = "\n".join((ROOT / page).read_text() for page in PAGES if not page.startswith("docs/api/"))
    named = set(re.findall(r"\bllqr\.(?:inner|curvature|probes|metric|integrations)\.[\w.]*[A-Z]\w+", text))
    for package, names in re.findall(r"^from (llqr\.(?!lab\.)[\w.]+) import ([\w, ]+)$", text, flags=re.M):
        named |= {f"{package}.{name.strip()}" for name in names.split(",")}
    shown = shown_by_the_api_pages()
    assert len(named) > 10
    assert not [name for name in named if not any(pkgutil.resolve_name(name) is one for one in shown)]


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


COSTS = [
    ("ResNet-18 (CIFAR), batch 128 | e-kfac, compiled, `U g` in bf16", "cadence-resnet18-side-2304", "resnet18"),
    ("ResNet-18 (CIFAR), batch 128 | kfac, compiled, `U g` in bf16", "cadence-resnet18-kfac", "resnet18"),
    ("ResNet-18 (CIFAR), batch 128 | diagonal", "cadence-resnet18-every-5", "resnet18"),
    ("ViT-B/16, batch 64 | e-kfac", "cadence-vit-every-5", "vit-b"),
    ("ViT-B/16, batch 64 | e-kfac-one-sided", "cadence-vit-b-one-sided", "vit-b"),
    ("ViT-L/16, batch 64 | e-kfac", "cadence-vit-every-5", "vit-l"),
    ("ViT-L/16, batch 64 | e-kfac-one-sided", "cadence-vit-l-one-sided", "vit-l"),
    ("MLP 64-64-64-10 on one CPU core, batch 64 | e-kfac", "cadence-mlp-cpu", "mlp:image_size=8,channels=1,classes=10"),
]


@pytest.mark.parametrize(("label", "file", "model"), COSTS)
def test_costs_are_those_measured(label, file, model):
    sam = _bench(file, model=model, method="SAM")["vs_sgd"]["median"]
    alone = _bench(file, model=model, method="LLQR", interval=500)
    both = _bench(file, model=model, method="LLQR+SAM", interval=500)
    over_sam, over_sgd, refresh = (both[key]["median"] for key in ("vs_sam", "vs_sgd", "refresh_seconds"))
    sparse = 0.75 * alone["vs_sam"]["median"] + 0.25 * over_sam
    plain = f"{sam:.2f} | {alone['vs_sgd']['median']:.2f}"
    row = f"| {label} | {plain} | {over_sam:.2f} | {over_sgd:.2f} | {sparse:.2f} | {refresh:.2f} s |"
    assert row in (ROOT / "docs/costs.md").read_text()
    if "| kfac, compiled" in label:
        assert re.search(rf"\| ResNet-18, batch 128 \| [\d.]+x \| {over_sam:.2f}x \|", _plain_text("README.md"))
    if "e-kfac, compiled" in label:
        for page in ("docs/costs.md", "docs/gain.md"):
            assert f"{sparse:.2f} of SAM's time" in _plain_text(page)
        readme = _plain_text("README.md")
        assert f"in {sparse:.2f} of its time" in readme
        assert f"SAM takes {sam:.2f}x as long as SGD, LLQR+SAM {over_sgd:.2f}x" in readme
        assert f"| ResNet-18, batch 128 | {over_sam:.2f}x |" in readme


def test_what_costs_say_beside_their_table_is_measured():
    page, readme = _plain_text("docs/costs.md"), _plain_text("README.md")
    every_product = []
    for size in "bl":
        files = ("cadence-vit-every-5", f"cadence-vit-{size}-one-sided", "cadence-vit")
        rows = [_bench(file, model=f"vit-{size}", method="LLQR+SAM", interval=500) for file in files]
        times = [row["vs_sam"]["median"] for row in rows] + [rows[-1]["paper"]["vs_sam"]]
        assert f"| ViT-{size.upper()}/16, batch 64 | " + " | ".join(f"{time:.2f}x" for time in times) + " |" in readme
        every_product.append(f"{times[2]:.2f}")
    assert "ViT-B takes {} and ViT-L {} times SAM".format(*every_product) in page
    alone, both = (
        _bench("cadence-resnet18-side-2304", model="resnet18", method=method, interval=500)
        for method in ("LLQR", "LLQR+SAM")
    )
    lasting = [row["lasting_vs_sam"]["median"] for row in (alone, both)]
    assert f"is {lasting[1]:.2f}, and {0.75 * lasting[0] + 0.25 * lasting[1]:.2f} with 1.25 passes" in page
    names = ["cadence-vit", "cadence-vit-every-3", "cadence-vit-every-5"]
    names += ["cadence-vit-b-one-sided", "cadence-vit-l-one-sided"]
    first = [row["first_refresh_seconds"] for name in names for row in _rows(name) if row.get("first_refresh_seconds")]
    said = f"{both['first_refresh_seconds']:.0f} s on ResNet-18 and {min(first):.0f} to {max(first):.0f} s on the ViTs"
    assert said in page


def test_a_basis_on_every_side_costs_what_was_measured():
    over_sam = _bench("cadence-resnet18-e-kfac", model="resnet18", method="LLQR+SAM", interval=500)["vs_sam"]["median"]
    assert f"costs {over_sam:.2f} times SAM (not compiled)" in _plain_text("docs/costs.md")


@pytest.mark.parametrize(
    ("label", "file"),
    [
        ("ResNet-18 (CIFAR) | diagonal", "memory-resnet18"),
        ("ViT-B/16 | e-kfac", "memory-vit-b"),
        ("ViT-B/16 | e-kfac, factors in bf16", "memory-vit-b-bf16"),
        ("ViT-B/16 | e-kfac, factors in bf16, `max_side=2304`", "memory-vit-b-bf16-side-2304"),
    ],
)
def test_memory_is_that_measured(label, file):
    structure = "diagonal" if "diagonal" in label else "e-kfac"
    step = _bench(file, what="LLQR+SAM", structure=structure)
    refresh = _bench(file, what="refresh", structure=structure)
    factors = f"{step['metric_bytes'] / 2**20:.0f} MiB"
    row = f"| {label} | {factors} | {step['vs_sam']:.2f} | {refresh['vs_sam']:.2f} |"
    assert row in (ROOT / "docs/costs.md").read_text()


def test_the_memory_of_extrapolated_products_is_that_measured():
    few = _bench("memory-vit-b-every-5", what="refresh", structure="e-kfac")
    assert f"which made it {few['vs_sam']:.2f} in the second row" in _plain_text("docs/costs.md")


def test_the_scalar_run_is_compared_with_sam_at_the_epoch_where_it_stopped():
    at, by = 147, {"scalar": [], "sam": []}
    for seed in range(3):
        for line in measurements.read_curves(ROOT / f"results/curves/cifar100-resnet18-seed{seed}.jsonl"):
            kind = (line["run"]["geometry"] or {"structure": "sam"})["structure"]
            if kind in by:
                by[kind].append(line["accuracy"][line["epoch"].index(at)])
    behind = statistics.mean(by["sam"]) - statistics.mean(by["scalar"])
    said = f"stopped at epoch {at} of 200, was {behind:.1f} points behind SAM there"
    assert said in _plain_text("docs/choose.md")


def test_the_times_of_a_small_network_are_those_measured():
    rows, page = _rows("host-cpu"), (ROOT / "docs/costs.md").read_text()

    def ratio(what, structure="", **others):
        wanted = {"what": what, "structure": structure, **others}
        (found,) = (row["ratio"]["median"] for row in rows if wanted.items() <= row.items())
        return found

    assert f"| SAM step / pytorch_optimizer's | | {ratio('SAM'):.2f} | |" in page
    for structure in ("e-kfac", "kfac", "diagonal"):
        step, alone = (ratio(what, structure, relative_to="SAM") for what in ("LLQR+SAM", "arithmetic"))
        assert f"/ SAM step | {structure} | {step:.2f} | 1 + {alone:.2f} |" in page
        alone = ratio("arithmetic", structure, relative_to="51 products")
        for every, label in (("1", "`product_every=1`"), ("3", "`product_every=3` (default)")):
            refresh = ratio("refresh", structure, engine="double-backward", product_every=every)
            assert f"| refresh, {label} / 51 bare products | {structure} | {refresh:.2f} | {alone:.2f} |" in page


def test_the_memory_of_channels_is_that_of_the_runs(tmp_path):
    name, methods = "metric-ablation/resnet18@side-2304", ["channels+sam", "side-2304+sam"]
    runs = describe(plan(name, recipe.load(name), methods, [0], tmp_path))
    few, many = (f"{run['metric_bytes'] / 2**20:.0f}" for run in runs)
    assert f"{few} MiB on ResNet-18 instead of {many}" in (ROOT / "docs/choose.md").read_text()


def test_the_errors_of_a_refresh_are_those_measured():
    errors = [row["errors"]["Ug"] for name in ("refresh-vit-b", "refresh-vit-b-few") for row in _rows(name)]
    (exact,) = (row["errors"]["Ug"] for row in _rows("refresh-vit-b-exact"))
    text = _plain_text("docs/costs.md")
    least, *_, most = sorted(f"{100 * error:.1f} %" for error in errors)
    assert f"by {least} (two-sided)" in text
    assert f"{most} (one-sided with `product_every=5`)" in text
    assert f"changes it by {100 * exact:.1f} %" in text


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
    compiled = epochs + both["first_refresh_seconds"] / (391 * sam["step_seconds"]["median"])
    said = f"60 epochs with a refresh every {run.geometry.every} steps take as long as {epochs:.0f} of SAM, and "
    assert f"{said}{compiled:.0f} with compiling" in _plain_text("docs/gain.md")
    readme = _plain_text("README.md")
    assert f"in {epochs / 60:.2f}x its time ({compiled / 60:.2f}x with compiling)" in readme
    alone = _bench("cadence-resnet18-side-2304", method="LLQR", interval=500)
    late = 0.75 * alone["lasting_vs_sam"]["median"] + 0.25 * both["lasting_vs_sam"]["median"]
    late += both["first_refresh_seconds"] / (200 * 391 * sam["step_seconds"]["median"])
    assert f"({late:.2f} with compiling)" in readme
    sgd = _bench("cadence-resnet18-side-2304", method="SGD")["vs_sam"]["median"]
    assert f"in {0.75 * sgd + 0.25:.2f} of SAM's time" in readme
    added = [both["first_refresh_seconds"] / (n * 391 * sam["step_seconds"]["median"]) for n in (200, 60)]
    said = "adds {:.2f} to the first row in 200 epochs, and {:.2f} in 60 with a refresh".format(*added)
    assert said in _plain_text("docs/costs.md")


def _plain_text(page):
    return " ".join((ROOT / page).read_text().replace("**", "").split())


def test_the_test_losses_and_the_gain_of_the_euclidean_norm_are_those_of_the_tables():
    kept = measurements.read(ROOT / "results")
    ours, euclidean = (
        {
            cell.method: cell
            for cell in tables.compare(tables.build(name, kept).of_rows(["resnet18"]), "sam").itertuples()
        }
        for name in ("cifar100", "cifar100@euclidean-0.1")
    )
    both = euclidean["llqr-ngd+sam"]
    text = _plain_text("README.md")
    losses = (ours["llqr-ngd+sam"].loss, ours["sam"].loss, both.loss)
    assert "{:.2f} against {:.2f}, and {:.2f} with the Euclidean norm".format(*losses) in text
    assert f"{both.difference:.2f} above SAM at 0.2 (p = {both.p:.2g})" in text


def test_the_controls_of_the_sparse_form_are_those_measured():
    kept = measurements.read(ROOT / "results")

    def last(table, method):
        (cell,) = (cell for cell in tables.build(table, kept).cells.itertuples() if cell.method == method)
        return cell.values

    late, sparse, seconds = (
        last(*one) for one in (("price", "late-2"), ("price", "sam-late-2"), ("price@146-epochs", "sam"))
    )
    sam = last("price", "sam")
    gain, p = statistics.mean(late) - statistics.mean(sam), ttest_ind(late, sam, equal_var=False).pvalue
    assert f"{gain:.2f} above SAM (p = {p:.2g}, n = 3)" in _plain_text("README.md")
    for other, page in ((sparse, "docs/gain.md"), (seconds, "docs/gain.md"), (seconds, "README.md")):
        difference = statistics.mean(late) - statistics.mean(other)
        p = ttest_ind(late, other, equal_var=False).pvalue
        assert re.search(rf"{difference:.2f} (above it|below `late-2`|below it) \(p = {p:.2g}", _plain_text(page))
    same_radius = statistics.mean(last("price", "sam-late-2-rho-0.3"))
    above, wider = statistics.mean(late) - same_radius, same_radius - statistics.mean(sparse)
    assert f"It is {above:.2f} above SAM in the same steps at the same radius" in _plain_text("README.md")
    whole = statistics.mean(late) - statistics.mean(sparse)
    said = f"the larger radius brings {wider:.2f} of the {whole:.2f}, and `late-2` is {above:.2f} above it"
    assert said in _plain_text("docs/gain.md")


def test_fine_tuning_is_what_was_measured():
    script, kept = (str(ROOT / "results/fine-tuning" / name) for name in ("sst.py", "sst.jsonl"))
    shown = subprocess.run([sys.executable, script, "--out", kept], capture_output=True, text=True, check=True).stdout
    assert shown.strip() in (ROOT / "docs/gain.md").read_text()


def test_the_metric_before_two_bases_is_what_was_measured():
    made = subprocess.run([sys.executable, ROOT / "results/bases/table.py"], capture_output=True, text=True, check=True)
    _, tested = made.stdout.strip().split("\n\n")
    assert tested in (ROOT / "docs/gain.md").read_text()
    curves = (ROOT / "results/bases/curves").iterdir()
    changes = [line["refresh_change"][-1] for path in curves for line in measurements.read_curves(path)]
    assert len(changes) == 10
    said = f"The metric changes gradients by {100 * min(changes):.0f} to {100 * max(changes):.0f} % at the end"
    assert said in _plain_text("docs/gain.md")


def test_fine_tuning_that_was_cut_short_is_left_out_of_the_tables(tmp_path):
    script, kept = (ROOT / "results/fine-tuning" / name for name in ("sst.py", "sst.jsonl"))
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    first = next(row for row in rows if row["task"] == "binary" and row["seed"] == 0)
    rows += [first | {"method": method} for method in ("sgd", "sgd+sam", "sgd+llqr", "sgd+llqr+sam")]
    (tmp_path / "sst.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = [sys.executable, str(script), "--out"]
    shown, whole = (
        subprocess.run([*made, str(path)], capture_output=True, text=True, check=True).stdout
        for path in (tmp_path / "sst.jsonl", kept)
    )
    assert shown == whole


def test_no_page_needs_a_server_to_be_seen():
    """Diagrams are pictures, not scripts that a browser would fetch."""
    assert not [page for page in PAGES if "```mermaid" in (ROOT / page).read_text()]


def test_the_picture_of_the_terminal_shows_the_kept_runs_of_the_demo():
    """If this fails, run `make figures`."""
    shown = html.unescape(re.sub(r"<[^>]*>", " ", (ROOT / "docs/figures/terminal.svg").read_text())).replace(
        "\xa0", " "
    )
    runs = [json.loads(line)["result"] for line in (ROOT / "results/demo/digits.jsonl").read_text().splitlines()]
    for one in summary.summarise(runs).itertuples():
        assert f"{one.best_mean:.2f} ± {one.best_std:.2f}" in shown
    assert "http" not in (ROOT / "docs/figures/terminal.svg").read_text().replace("http://www.w3.org/2000/svg", "")

"""The report: a page that agrees with the files of the runs, and works in a browser."""

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from fake_runs import BLEU, write_analysis, write_run
from llqr.lab import report
from llqr.lab.analysis import solution
from llqr.lab.cli import app as cli
from llqr.lab.errors import ConfigurationError, DataError
from llqr.lab.report.conclusion import conclusion, deciding
from llqr.lab.report.section import Section
from llqr.lab.runs import stored
from llqr.lab.runs.folder import RunFolder
from llqr.lab.runs.stored import find
from llqr.lab.tasks import Task

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CPU = torch.device("cpu")


class Page(HTMLParser):
    """Tables as lists of rows, links, titles and ids; raises an error for tags that do not match."""

    VOID = {"meta", "link", "line", "br", "use", "path", "rect", "circle", "ellipse", "image"}

    def __init__(self, text):
        super().__init__()
        self.tables, self.links, self.ids, self.external, self.text = [], [], [], [], ""
        self.open = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append({"text": "", "title": found.get("title", ""), "key": found.get("data-key")})
        if "id" in found:
            self.ids.append(found["id"])
        if tag == "a":
            self.links.append(found["href"])
        for key in ("src", "href", "xlink:href"):
            if re.match(r"(https?:)?//", found.get(key) or ""):
                self.external.append(found[key])

    def handle_startendtag(self, tag, attributes):
        if "id" in dict(attributes):
            self.ids.append(dict(attributes)["id"])

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.open and set(self.open) & {"td", "th"}:
            self.tables[-1][-1][-1]["text"] += data

    def table(self, *headings):
        """The table with these first headings, as method -> heading -> cell."""
        for header, *rows in self.tables:
            names = [cell["text"] for cell in header]
            if names[: len(headings)] == list(headings):
                return {row[0]["text"]: dict(zip(names, row, strict=True)) for row in rows}
        raise AssertionError(f"no table {headings}")


def write_runs(root):
    """Two methods with two seeds each, one of them with a metric, and an unfinished run."""
    write_run(root, "sgdm", 0, best=90.0)
    write_run(root, "sgdm", 1, best=92.0, result={"epoch_seconds": 3.0})
    for seed, best in enumerate((95.0, 95.5)):
        folder = write_run(root, "llqr-ngd+sam", seed, best=best, result={"epoch_seconds": 5.0})
        write_analysis(folder, top=4.0 + seed, perceived=2.0 + seed)
    write_run(root, "sam", 0, finished=False)
    return root


@pytest.fixture
def runs(tmp_path):
    return write_runs(tmp_path)


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory):
    """The same runs for tests that only read."""
    return write_runs(tmp_path_factory.mktemp("unchanged"))


@pytest.fixture(scope="module")
def found(unchanged):
    """The page on these runs; drawing its plots takes a second or two."""
    return page(unchanged)


@pytest.fixture
def undrawn(monkeypatch):
    """Plots are made but not drawn, which takes most of the time of a page."""
    monkeypatch.setattr("llqr.lab.report.plots.Plot.svg", lambda plot: "<svg></svg>")


def page(root, **arguments):
    return Page(report.render(find([root]), root, **arguments))


def test_the_table_of_methods_agrees_with_the_results(found):
    table = found.table("method", "best accuracy")
    assert list(table) == ["sgdm", "llqr-ngd+sam"]
    assert table["sgdm"]["best accuracy"]["text"] == "91.00 ± 1.41"
    assert table["llqr-ngd+sam"]["best accuracy"]["text"] == "95.25 ± 0.35"
    assert table["sgdm"]["n"]["text"] == "2"
    assert table["sgdm"]["s / epoch"]["text"] == "2.000"
    assert table["llqr-ngd+sam"]["time / sgdm"]["text"] == "2.50×"
    assert table["llqr-ngd+sam"]["last test loss"]["text"] == "0.5000 ± 0.0000"


def opening(root):
    """The sentence that the page opens with."""
    runs = find([root])
    return conclusion(Section(runs[0].recipe, runs, root, {}, []))


def test_the_page_opens_with_what_came_out(found, unchanged):
    """Welch's p of (90, 92) against (95, 95.5), by scipy's test on the values: 0.130."""
    said = opening(unchanged)
    assert found.text.split("Fake <runs>")[2].strip().startswith(said)  # after the title of the tab and the heading
    assert said == (
        "llqr-ngd+sam came out best, with a best accuracy of 95.25 ± 0.35 (n = 2), "
        "4.25 above sgdm, which has 91.00 ± 1.41 (n = 2). "
        "Welch's p is 0.13: seeds alone could explain the difference. "
        "One epoch of llqr-ngd+sam took 2.50 times as long as one of sgdm (5.000 s against 2.000 s). "
        "1 of 5 runs are not finished."
    )


def test_the_next_best_method_is_compared_too(tmp_path):
    for seed in range(3):
        write_run(tmp_path, "sgdm", seed, best=90 + 0.1 * seed)
        write_run(tmp_path, "sam", seed, best=95 + 0.1 * seed)
        write_run(tmp_path, "llqr-ngd+sam", seed, best=95.1 + 0.2 * seed)
    said = opening(tmp_path)
    assert "above sgdm, which has 90.10 ± 0.10 (n = 3)." in said
    assert re.search(r"Next is sam with 95\.10 ± 0\.10 \(n = 3\)\. Welch's p is \S+: seeds alone could explain", said)


def test_a_clear_difference_is_called_one(tmp_path):
    for seed in range(3):
        write_run(tmp_path, "sgdm", seed, best=90 + 0.1 * seed)
        write_run(tmp_path, "sam", seed, best=95 + 0.1 * seed)
    assert re.search(r"Welch's p is \d\S+: seeds alone hardly explain the difference\.", opening(tmp_path))


def test_with_one_run_per_method_the_page_says_that_there_is_no_p(tmp_path):
    write_run(tmp_path, "sgdm", 0, best=90.0)
    write_run(tmp_path, "sam", 0, best=91.0)
    said = opening(tmp_path)
    assert "1.00 above sgdm, which has 90.00 (n = 1). With one run of each method there is no p" in said
    assert "± " not in said


def test_the_best_method_may_be_the_first_and_smaller_may_be_better(tmp_path):
    smaller = BLEU | {"metric": "perplexity", "larger_is_better": False, "others": []}
    for method, best in (("sgdm", 10.0), ("sam", 12.0), ("llqr-ngd", 11.0)):
        write_run(tmp_path, method, 0, best=best, task=smaller)
    assert opening(tmp_path).startswith(
        "sgdm came out best, with a best perplexity of 10.00 (n = 1), 1.00 below llqr-ngd, which has 11.00 (n = 1)."
    )


def test_one_method_and_no_finished_run_are_said_too(tmp_path):
    write_run(tmp_path, "sgdm", 0, finished=False)
    assert opening(tmp_path) == "No run is finished yet."
    write_run(tmp_path, "sam", 0, best=91.0)
    said = "sam came out best, with a best accuracy of 91.00 (n = 1); it is the only method. One epoch took 1.000 s."
    assert opening(tmp_path) == said


def test_a_test_set_that_did_not_choose_the_evaluation_is_named(tmp_path):
    for method, tested in (("sgdm", 33.0), ("sam", 33.5)):
        write_run(tmp_path, method, 0, best=tested + 1, task=BLEU, result={"test_of_best": {"BLEU": tested}})
    assert "On the test set it is 33.50 against 33.00." in opening(tmp_path)


def test_what_decides_the_runs_stands_beside_the_results(found):
    headings = [[cell["text"] for cell in header] for header, *_ in found.tables]
    assert headings[0][:2] == ["method", "best accuracy"]
    assert headings[1][:4] == ["method", "rho", "structure", "lr"]
    deciding = found.table("method", "rho", "structure", "lr")
    assert [deciding["llqr-ngd+sam"][key]["text"] for key in ("rho", "structure", "lr")] == ["0.1", "e-kfac", "0.05"]
    assert [deciding["sgdm"][key]["text"] for key in ("rho", "structure")] == ["–", "–"]


def test_runs_of_one_method_with_different_settings_show_all_of_them(tmp_path):
    for seed, rho in enumerate((0.1, 0.2)):
        folder = write_run(tmp_path, "sam", seed)
        config = json.loads((folder / "config.json").read_text())
        config["run"]["probe"]["rho"] = rho
        (folder / "config.json").write_text(json.dumps(config))
    runs = find([tmp_path])
    table = deciding(Section("digits/mlp", runs, tmp_path, {}, []))
    assert [cell.text for cell in table.rows[0][:2]] == ["sam", "0.1, 0.2"]


@pytest.mark.usefixtures("undrawn")
def test_only_seeds_are_averaged(tmp_path):
    """A sweep in folders of one's own, `--out runs/rho-0.1`: other settings are other methods, and no further seeds."""
    for rho, best in ((0.1, 80.0), (0.2, 90.0)):
        for seed in range(2):
            folder = write_run(tmp_path / f"rho-{rho}", "sam", seed, best=best + seed)
            config = json.loads((folder / "config.json").read_text())
            config["run"]["probe"]["rho"] = rho
            (folder / "config.json").write_text(json.dumps(config))
        write_run(tmp_path / f"rho-{rho}", "sgdm", 0, best=85.0)
    found = page(tmp_path)
    rows = found.table("method", "best accuracy")
    assert {method: (row["best accuracy"]["text"], row["n"]["text"]) for method, row in rows.items()} == {
        "sgdm": ("85.00", "1"),
        "sam, probe.rho=0.1": ("80.50 ± 0.71", "2"),
        "sam, probe.rho=0.2": ("90.50 ± 0.71", "2"),
    }
    assert found.table("setting", "sgdm")["probe.rho"]["sam, probe.rho=0.2"]["text"] == "0.2"
    repeated = tmp_path / "rho-0.2" / "digits/mlp" / "sgdm" / "seed0"
    assert f"Not counted, because another folder has the same run: {repeated}." in found.text


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_is_finished_stands_for_one_that_is_not(tmp_path):
    write_run(tmp_path / "first", "sgdm", 0, finished=False)
    write_run(tmp_path / "second", "sgdm", 0, best=85.0)
    assert page(tmp_path).table("method", "best accuracy")["sgdm"]["best accuracy"]["text"] == "85.00"


def test_a_number_that_is_not_finite_is_said_to_be_none(tmp_path):
    """The accuracy decides the run; the test loss may be NaN beside it, which JSON holds as null."""
    for seed in range(2):
        write_run(tmp_path, "sgdm", seed, result={"test": {"accuracy": 90.0, "loss": None if seed else 0.5}})
    rows = page(tmp_path).table("method", "best accuracy")
    assert rows["sgdm"]["last test loss"]["text"] == "not finite"


def test_a_tie_has_no_winner(tmp_path):
    for method in ("sgdm", "sam"):
        for seed in range(2):
            write_run(tmp_path, method, seed, best=90.0 + seed)
    assert opening(tmp_path).startswith(
        "sgdm and sam came out equal, with a best accuracy of 90.50 ± 0.71 (n = 2). One epoch of "
    )


def test_every_number_links_to_its_file(found, unchanged):
    cell = found.table("method", "best accuracy")["sgdm"]["best accuracy"]
    assert cell["title"].splitlines() == [
        "90  digits/mlp/sgdm/seed0/result.json: best",
        "92  digits/mlp/sgdm/seed1/result.json: best",
    ]
    sharpness = found.table("method", "top eigenvalue")["llqr-ngd+sam"]
    assert "4  digits/mlp/llqr-ngd+sam/seed0/analysis.json: sharpness.top.value" in sharpness["top eigenvalue"]["title"]
    for link in found.links:
        assert link[1:] in found.ids if link.startswith("#") else (unchanged / link).exists(), link
    assert "digits/mlp/sgdm/seed1/log.jsonl" in found.links


@pytest.mark.usefixtures("undrawn")
def test_links_are_relative_to_the_page(runs):
    elsewhere = runs.parent / "pages"
    elsewhere.mkdir()
    files = [link for link in Page(report.render(find([runs]), elsewhere)).links if not link.startswith("#")]
    assert files
    assert all((elsewhere / link).exists() for link in files)


def test_the_page_is_self_contained_and_its_ids_are_unique(found):
    assert not found.external
    assert len(found.ids) == len(set(found.ids))
    assert "Fake <runs>" in found.text


def test_sharpness_slices_and_refreshes_are_shown(found):
    sharpness = found.table("method", "top eigenvalue")
    assert list(sharpness) == ["llqr-ngd+sam"]
    assert sharpness["llqr-ngd+sam"]["top eigenvalue"]["text"] == "4.500 ± 0.707"
    assert sharpness["llqr-ngd+sam"]["perceived"]["text"] == "2.500 ± 0.707"
    assert "on 64 training samples" in found.text
    assert "Along the top eigenvector" in found.text
    refreshes = found.table("method", "refreshes")["llqr-ngd+sam"]
    shown = ("refreshes", "rejected", "seconds each", "of the time", "change of J", "engine", "lowest U", "MiB of U")
    assert [refreshes[key]["text"] for key in shown] == [
        "4", "2", "0.500", "50.0 %", "-50.00 %", "forward", "0.5000", "1.00",
    ]  # fmt: skip
    assert "layer 5" in refreshes["lowest U"]["title"]


def test_the_effect_of_the_metric_on_gradients_is_shown(found):
    """The last accepted refresh counts: of four, the second was rejected, and the fourth changed g by 40 %."""
    row = found.table("method", "refreshes")["llqr-ngd+sam"]
    assert (row["change of g"]["text"], row["cos(g, Ug)"]["text"]) == ("40 %", "0.600")
    assert "0.4  digits/mlp/llqr-ngd+sam/seed0/log.jsonl: refreshes.change" in row["change of g"]["title"]
    assert "Change of a gradient by U" in found.text
    rows = [row for header, *rows in found.tables for row in rows if header[1]["text"] == "seed"]
    assert [row[8]["text"] for row in rows] == ["–", "–", "–", "40 %", "40 %"]
    assert "J is the objective that a refresh minimises" in found.text
    assert "nearly nothing" not in found.text


def rewrite_reports(root, change):
    """Change the report of every refresh in the logs, in place."""
    for log in root.rglob("log.jsonl"):
        records = [json.loads(line) for line in log.read_text().splitlines()]
        for report_of_refresh in (one for record in records for one in record["refreshes"]):
            change(report_of_refresh)
        log.write_text("".join(f"{json.dumps(record)}\n" for record in records))


@pytest.mark.usefixtures("undrawn")
def test_a_metric_next_to_the_identity_is_called_that(runs):
    rewrite_reports(runs / "digits/mlp/llqr-ngd+sam/seed0", lambda one: one.update(change=0.0002))
    said = "The metric of llqr-ngd+sam changed gradients by 0.02 %{}: it did nearly nothing."
    assert said.format(" in 1 of 2 runs") in page(runs).text
    rewrite_reports(runs / "digits/mlp/llqr-ngd+sam/seed1", lambda one: one.update(change=0.0002))
    assert said.format("") in page(runs).text


@pytest.mark.usefixtures("undrawn")
def test_logs_from_before_the_effect_was_logged_are_read(runs):
    rewrite_reports(runs, lambda one: [one.pop(key) for key in ("change", "cosine")])
    found = page(runs)
    assert found.table("method", "refreshes")["llqr-ngd+sam"]["change of g"]["text"] == "–"
    assert "Change of a gradient by U" not in found.text
    headings = [cell["text"] for header, *_ in found.tables for cell in header if header[1]["text"] == "seed"]
    assert "change of g" not in headings


@pytest.mark.usefixtures("undrawn")
def test_a_metric_that_is_not_positive_shows_a_dash_with_the_reason(tmp_path):
    write_analysis(write_run(tmp_path, "llqr-ngd", 0), 4.0, None, reason="U is not positive")
    cell = page(tmp_path).table("method", "top eigenvalue")["llqr-ngd"]["perceived"]
    assert (cell["text"], cell["title"]) == ("–", "U is not positive")


@pytest.mark.usefixtures("undrawn")
def test_a_slice_may_leave_the_range_of_numbers(tmp_path):
    """The loss of weights that were moved may overflow, which JSON holds as null."""
    folder = write_run(tmp_path, "sgdm", 0)
    write_analysis(folder, 4.0, 4.0)
    analysis = json.loads((folder / "analysis.json").read_text())
    for line in analysis["slices"]:
        line["losses"][0] = None
    (folder / "analysis.json").write_text(json.dumps(analysis))
    assert "Along the top eigenvector" in page(tmp_path).text


def test_runs_that_were_evaluated_differently_are_not_averaged(tmp_path):
    """As by an experiment of one's own that was changed between two folders of runs."""
    write_run(tmp_path, "sgdm", 0)
    write_run(tmp_path, "sam", 0, task=BLEU)
    with pytest.raises(ConfigurationError, match="those of digits/mlp were evaluated by test BLEU and test accuracy;"):
        page(tmp_path)


def test_an_unfinished_run_is_listed_but_not_averaged(found):
    assert "5 runs, 4 of them finished" in found.text
    rows = [row for header, *rows in found.tables for row in rows if header[1]["text"] == "seed"]
    assert [cell["text"] for cell in rows[2]][:4] == ["sam", "0", "epoch 2 of 4", "–"]
    assert "sam" not in found.table("method", "best accuracy")


def test_nothing_assumes_images(tmp_path):
    """BLEU and perplexity, counted in tokens."""
    for method in ("sgdm", "llqr-ngd"):
        write_run(tmp_path, method, 0, best=34.5, task=BLEU)
    found = page(tmp_path)
    table = found.table("method", "best BLEU")
    assert table["llqr-ngd"]["best BLEU"]["text"] == "34.50"
    assert table["llqr-ngd"]["last test perplexity"]["text"] == "0.5000"
    assert {"test BLEU", "test perplexity", "train loss"} <= set(re.findall(r"(?:test|train) \w+", found.text))
    assert "100 tokens" in found.text
    assert "accuracy" not in found.text
    assert "image" not in found.text


def test_smaller_may_be_better(tmp_path):
    smaller = BLEU | {"metric": "perplexity", "larger_is_better": False, "others": []}
    for method, best in (("sgdm", 12.0), ("sam", 11.0)):
        write_run(tmp_path, method, 0, best=best, task=smaller)
    text = report.render(find([tmp_path]), tmp_path)
    assert "a smaller perplexity is better" in text
    (strong,) = re.findall(r"<strong>(.*?)</strong>", text)
    assert ">11.00<" in strong


def test_settings_in_which_methods_differ_are_shown_side_by_side(found):
    differing = found.table("setting", "sgdm")
    assert differing["geometry.structure"]["llqr-ngd+sam"]["text"] == "e-kfac"
    assert differing["probe.rho"]["sgdm"]["text"] == "–"
    assert found.table("setting", "value")["training.epochs"]["value"]["text"] == "4"
    made = found.table("", "value")
    assert (made["versions.torch"]["value"]["text"], made["commit"]["value"]["text"]) == ("2.13.0", "0123abc")


@pytest.mark.usefixtures("undrawn")
def test_structures_by_patterns_are_shown(tmp_path):
    folder = write_run(tmp_path, "llqr-ngd", 0)
    config = json.loads((folder / "config.json").read_text())
    config["run"]["geometry"]["structure"] = {"0.*": "kfac", "*": "diagonal"}
    (folder / "config.json").write_text(json.dumps(config))
    table = deciding(Section("digits/mlp", find([tmp_path]), tmp_path, {}, []))
    assert dict(zip(table.headings, table.rows[0], strict=True))["structure"].text == "0.*: kfac, *: diagonal"


@pytest.mark.usefixtures("undrawn")
def test_links_within_the_page_tell_names_in_any_script_apart(tmp_path):
    for name in ("опыт 1", "проба 1"):
        write_run(tmp_path / name, "sgdm", 0, config={"recipe": name}, result={"recipe": name, "title": name})
    found = page(tmp_path)
    assert len(found.ids) == len(set(found.ids)) == 4
    assert {link[1:] for link in found.links if link.startswith("#")} == set(found.ids)


def test_every_recipe_has_its_own_section(tmp_path):
    write_run(tmp_path, "sgdm", 0)
    write_run(tmp_path, "sgdm", 0, name="cifar10/resnet18")
    found = page(tmp_path)
    assert found.text.count("sgdm came out best") == 2
    assert {"digits-mlp", "cifar10-resnet18"} <= set(found.ids)
    assert "2 experiments" in found.text


def test_runs_are_found_in_the_order_of_the_table_and_once(runs):
    found = find([runs, runs / "digits/mlp/sgdm"])
    assert [(run.method, run.seed) for run in found] == [
        ("sgdm", 0), ("sgdm", 1), ("sam", 0), ("llqr-ngd+sam", 0), ("llqr-ngd+sam", 1),
    ]  # fmt: skip


def test_a_truncated_log_is_read_and_a_damaged_one_refused(tmp_path):
    under_way, done = write_run(tmp_path, "sam", 0, finished=False), write_run(tmp_path, "sgdm", 0)
    for folder in (under_way, done):
        with (folder / "log.jsonl").open("a") as file:
            file.write('{"epoch": 3, "tr')
    assert len(stored.read(under_way).records) == 2
    with pytest.raises(DataError, match=r"log\.jsonl, line 5 is damaged"):
        stored.read(done)


@pytest.mark.parametrize(("arguments", "said"), [(["missing"], "is not there"), (["."], "holds no run")])
def test_folders_without_runs_are_refused(tmp_path, capsys, arguments, said):
    assert run_cli("report", *(str(tmp_path / name) for name in arguments)) == 3
    assert said in capsys.readouterr().err


def run_cli(*arguments):
    with pytest.raises(SystemExit) as end:
        cli.main(list(arguments))
    return end.value.code


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """What `llqr compare` writes for short runs."""
    root = tmp_path_factory.mktemp("compared")
    settings = [f"--set=geometries.ngd.{setting}" for setting in ("every=10", "inner.steps=3", "structure=kfac")]
    arguments = ["digits/mlp", "--methods", "sam,llqr", "--seeds", "1", "--quiet"]
    torch.manual_seed(0)
    assert run_cli("compare", *arguments, "--set=training.epochs=2", *settings, "--out", str(root)) == 0
    return root


def test_compare_writes_a_report_on_its_runs(compared):
    text = (compared / "report.html").read_text()
    found = Page(text)
    table = found.table("method", "best accuracy")
    assert list(table) == ["sam", "llqr-ngd"]  # in the requested order: times are relative to the first
    assert "time / sam" in table["sam"]
    analyses = {path.parts[-3]: json.loads(path.read_text()) for path in compared.rglob("analysis.json")}
    sharpness = {method: one["sharpness"] for method, one in analyses.items()}
    assert sharpness["sam"]["top"] == sharpness["sam"]["perceived"]
    assert sharpness["llqr-ngd"]["top"]["value"] != sharpness["llqr-ngd"]["perceived"]["value"] > 0
    assert all(one["samples"] == Task.samples_measured for one in analyses.values())
    shown = found.table("method", "top eigenvalue")["sam"]["top eigenvalue"]["key"]
    assert float(shown) == sharpness["sam"]["top"]["value"]


def test_the_measured_solution_is_the_trained_network(compared):
    folder = RunFolder(compared / "digits/mlp/llqr-ngd/seed0")
    task = folder.run().load_task(CPU)
    model, metric = solution.load(folder, task, CPU)
    with torch.no_grad():
        assert task.evaluate(model.eval()) == folder.result()["test"]
    assert metric.learned
    assert set(metric.kinds.values()) == {"kfac", "diagonal"}


@pytest.mark.usefixtures("undrawn")
def test_a_solution_is_measured_again_only_on_other_samples(compared, tmp_path):
    root = shutil.copytree(compared, tmp_path / "copy")
    run = "digits/mlp/sam/seed0"
    before = (root / run / "analysis.json").read_text()
    assert run_cli("report", str(root / run), "--out", str(tmp_path / "page.html"), "--quiet") == 0
    assert (root / run / "analysis.json").read_text() == before
    assert run_cli("report", str(root / run), "--samples", "100", "--quiet") == 0
    assert json.loads((root / run / "analysis.json").read_text())["samples"] == 100
    assert (root / run / "report.html").exists()


@pytest.mark.usefixtures("undrawn")
def test_without_a_checkpoint_the_report_says_what_was_not_measured(compared, tmp_path):
    root = shutil.copytree(compared, tmp_path / "copy")
    for name in ("checkpoint.pt", "analysis.json"):
        (root / "digits/mlp/sam/seed0" / name).unlink()
    assert run_cli("report", str(root), "--quiet") == 0
    text = html.unescape((root / "report.html").read_text())
    assert re.search(r"Not measured: \S*sam/seed0/checkpoint\.pt is not there\.", text)


# Clicks a heading twice and records the order of the rows after each click where the test can read it.
CLICKS = """
<script>
  const table = document.querySelector("table");
  const first = () => [...table.tBodies[0].rows].map((row) => row.cells[0].textContent).join(" ");
  const button = table.tHead.rows[0].cells[1].querySelector("button");
  const seen = [first()];
  for (let i = 0; i < 2; i++) { button.click(); seen.push(first()); }
  document.body.dataset.seen = seen.join("|");
  document.body.dataset.wide = document.documentElement.scrollWidth > innerWidth;
</script>
"""


def browse(path, *options):
    """The page after its scripts ran, and the output of the console."""
    quiet = ("--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-sync", *quiet, *options]
    command += [f"--user-data-dir={path.parent / 'profile'}", "--enable-logging=stderr", "--v=0", "--dump-dom"]
    done = subprocess.run([*command, path.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(BROWSER is None, reason="needs chromium (apt-get install chromium)")
def test_a_browser_finds_no_error_and_sorts(runs):
    path = runs / "page.html"
    path.write_text(report.render(find([runs]), runs).replace("</body>", f"{CLICKS}</body>"))
    dom, console = browse(path, "--window-size=500,900")
    assert console == []
    seen = re.search(r'data-seen="([^"]*)"', dom)[1].split("|")
    assert seen == ["sgdm llqr-ngd+sam", "sgdm llqr-ngd+sam", "llqr-ngd+sam sgdm"]
    assert 'data-wide="false"' in dom  # on a phone only the tables scroll sideways
    assert 'aria-sort="descending"' in dom


# Writes down the colours of the page, of a table's heading, of a curve and of a label of its axes.
COLOURS = """
<script>
  const names = ["body", "thead th", "figure svg path[style*='#0072b2']", "figure svg text"];
  const shown = names.map((name) => getComputedStyle(document.querySelector(name)));
  document.body.dataset.seen = [shown[0].backgroundColor, shown[0].color, shown[1].backgroundColor, shown[2].stroke,
    shown[3].fill].join("|");
</script>
"""


@pytest.mark.skipif(BROWSER is None, reason="needs chromium (apt-get install chromium)")
def test_the_page_and_its_figures_follow_the_scheme_of_the_reader(unchanged, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(report.render(find([unchanged]), tmp_path).replace("</body>", f"{COLOURS}</body>"))
    for scheme, dark in (("0", True), ("1", False)):
        dom, _ = browse(path, f"--blink-settings=preferredColorScheme={scheme}")
        seen = re.search(r'data-seen="([^"]*)"', dom)[1].split("|")
        lightness = [sum(map(int, re.findall(r"\d+", colour)[:3])) / 3 for colour in seen]
        ground, ink, heading, curve, label = lightness
        assert (ground < 60) is dark
        assert (heading < 60) is dark
        assert min(abs(drawn - ground) for drawn in (ink, label)) > 180
        assert abs(curve - ground) > 70


@pytest.mark.skipif(BROWSER is None, reason="needs chromium (apt-get install chromium)")
def test_the_browser_test_detects_errors(tmp_path):
    path = Path(tmp_path / "page.html")
    path.write_text("<!doctype html><script>missing();</script>")
    assert any("missing is not defined" in line for line in browse(path)[1])

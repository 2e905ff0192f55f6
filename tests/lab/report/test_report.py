"""The report: a page that agrees with the files of the runs, and works in a browser."""

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
import torch
from scipy.stats import ttest_ind

from fake_runs import BLEU, write_analysis, write_run
from llqr.lab import report
from llqr.lab.analysis import solution
from llqr.lab.cli import app as cli
from llqr.lab.errors import ConfigurationError, DataError
from llqr.lab.number_table import spread
from llqr.lab.report.parts import conclusion
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
            self.tables[-1][-1].append({"text": ""})
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
    monkeypatch.setattr("llqr.lab.pictures.inline", lambda figure, title: f"<svg>{title}</svg>")


def page(root, **arguments):
    return Page(report.render(find([root]), root, **arguments))


def test_the_table_of_methods_agrees_with_the_results(found):
    table = found.table("method", "last accuracy")
    assert list(table) == ["sgdm", "llqr-ngd+sam"]
    assert table["sgdm"]["last accuracy"]["text"] == "91.00 ± 1.41"
    assert table["llqr-ngd+sam"]["last accuracy"]["text"] == "95.25 ± 0.35"
    assert table["sgdm"]["n"]["text"] == "2"
    assert table["sgdm"]["s / epoch"]["text"] == "2.000"
    assert table["llqr-ngd+sam"]["time / sgdm"]["text"] == "2.50×"
    assert table["llqr-ngd+sam"]["last test loss"]["text"] == "0.5000 ± 0.0000"
    assert [row["p against sgdm"]["text"] for row in table.values()] == ["–", "–"]  # two seeds are too few


def opening(root):
    return conclusion(find([root]))


def test_a_sentence_says_what_came_out(found, unchanged, tmp_path):
    said = "llqr-ngd+sam ends with the best accuracy: 95.25 ± 0.35 (n = 2), against 91.00 ± 1.41 (n = 2) of sgdm; no p."
    assert opening(unchanged) == said
    assert said in found.text
    write_run(tmp_path, "sgdm", 0, finished=False)
    assert opening(tmp_path) == "No run is finished yet."
    write_run(tmp_path, "sam", 0, best=91.0)
    assert opening(tmp_path) == "sam ends with the best accuracy: 91.00 (n = 1); it is the only method."


def test_three_seeds_have_a_p(tmp_path, undrawn):
    seeds = {"sgdm": [90.0, 92.0, 91.0], "sam": [95.0, 95.5, 94.0]}
    for method, own in seeds.items():
        for seed, last in enumerate(own):
            write_run(tmp_path, method, seed, best=99.0, result={"last": last})
    p = ttest_ind(*seeds.values(), equal_var=False).pvalue
    assert opening(tmp_path).endswith(f"; Welch's p = {p:.2g}.")
    assert page(tmp_path).table("method", "last accuracy")["sam"]["p against sgdm"]["text"] == f"{p:.2g}"


def test_the_best_method_may_be_the_first_and_smaller_may_be_better(tmp_path):
    smaller = BLEU | {"metric": "perplexity", "larger_is_better": False, "others": []}
    for method, best in (("sgdm", 10.0), ("sam", 12.0), ("llqr-ngd", 11.0)):
        write_run(tmp_path, method, 0, best=best, task=smaller)
    said = "sgdm ends with the best perplexity: 10.00 (n = 1), against 11.00 (n = 1) of llqr-ngd; no p."
    assert opening(tmp_path) == said
    assert "a smaller perplexity is better" in page(tmp_path).text


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
    rows = found.table("method", "last accuracy")
    assert {method: (row["last accuracy"]["text"], row["n"]["text"]) for method, row in rows.items()} == {
        "sgdm": ("85.00", "1"),
        "sam, probe.rho=0.1": ("80.50 ± 0.71", "2"),
        "sam, probe.rho=0.2": ("90.50 ± 0.71", "2"),
    }
    assert found.table("setting", "sgdm")["probe.rho"]["sam, probe.rho=0.2"]["text"] == "0.2"
    repeated = tmp_path / "rho-0.2" / "digits/mlp" / "sgdm" / "seed0"
    assert f"Not counted, because another folder has the same run: {repeated}." in found.text


def test_a_number_that_is_not_finite_is_said_to_be_none(tmp_path):
    """The accuracy decides the run; the test loss may be NaN beside it, which JSON holds as null."""
    for seed in range(2):
        write_run(tmp_path, "sgdm", seed, result={"test": {"accuracy": 90.0, "loss": None if seed else 0.5}})
    rows = page(tmp_path).table("method", "last accuracy")
    assert rows["sgdm"]["last test loss"]["text"] == "not finite"


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("resumed", [False, True])
def test_times_of_a_shared_device_are_left_out(tmp_path, resumed):
    machine = {"device": "cpu", "platform": "Linux", "cpus": 2, "threads": 1, "shared": True}
    shared = {"machine": machine, "command": "llqr"}
    write_run(tmp_path, "sgdm", 0)
    alone = report.render(find([tmp_path]), tmp_path)
    assert "time / sgdm" in Page(alone).table("method", "last accuracy")["sgdm"]
    assert "test accuracy over time" in alone
    write_run(tmp_path, "sam", 0, config={"resumed": [shared]} if resumed else shared)
    found = page(tmp_path)
    assert "time / sgdm" not in found.table("method", "last accuracy")["sgdm"]
    assert "over time" not in report.render(find([tmp_path]), tmp_path)
    assert "no times, because other programs used the device" in found.text


def test_the_page_is_self_contained_and_names_the_folders_of_the_runs(found, unchanged):
    assert not found.external
    assert len(found.ids) == len(set(found.ids))
    folders = [row[-1]["text"] for header, *rows in found.tables for row in rows if header[-1]["text"] == "folder"]
    assert len(folders) == 5
    assert all((unchanged / folder / "config.json").exists() for folder in folders)
    assert "Fake <runs>" in found.text


def test_sharpness_is_shown(found):
    sharpness = found.table("method", "top eigenvalue")
    assert list(sharpness) == ["llqr-ngd+sam"]
    assert sharpness["llqr-ngd+sam"]["top eigenvalue"]["text"] == "4.500 ± 0.707"
    assert sharpness["llqr-ngd+sam"]["perceived"]["text"] == "2.500 ± 0.707"
    assert "on 64 training samples" in found.text


def test_a_perceived_sharpness_that_not_all_runs_have_says_how_many_do(runs):
    write_analysis(runs / "digits/mlp/llqr-ngd+sam/seed1", top=5.0, perceived=None, reason="U is not positive.")
    sharpness = Page(report.render(find([runs]), runs)).table("method", "top eigenvalue")["llqr-ngd+sam"]
    assert (sharpness["perceived"]["text"], sharpness["n"]["text"]) == ("2.000 (n = 1)", "2")


def test_solutions_measured_on_other_samples_are_named(runs):
    """Without ``--samples`` a report keeps what was measured before."""
    write_analysis(runs / "digits/mlp/llqr-ngd+sam/seed1", top=5.0, perceived=2.0, samples=100)
    assert "on 64 or 100 training samples" in report.render(find([runs]), runs)


def test_refreshes_are_shown(found):
    refreshes = found.table("method", "refreshes")["llqr-ngd+sam"]
    shown = ("refreshes", "rejected", "seconds each", "of the time", "change of J", "engine", "MiB of U")
    assert [refreshes[key]["text"] for key in shown] == [
        "4", "1", "0.500", "50.0 %", "-50.00 %", "forward", "1.00",
    ]  # fmt: skip


def test_the_effect_of_the_metric_on_gradients_is_shown(found):
    """The last accepted refresh counts: of four, the second was rejected, and the fourth changed g by 40 %."""
    row = found.table("method", "refreshes")["llqr-ngd+sam"]
    assert (row["change of g"]["text"], row["cos(g, Ug)"]["text"]) == ("40 %", "0.600")
    assert "Change of a gradient by U" in found.text
    assert "J is the objective of a refresh" in found.text
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
    rewrite_reports(runs, lambda one: one.update(change=0.0002))
    row = page(runs).table("method", "refreshes")["llqr-ngd+sam"]
    assert row["change of g"]["text"] == "0.02 % (nearly nothing)"


@pytest.mark.usefixtures("undrawn")
def test_runs_that_were_evaluated_differently_are_not_averaged(tmp_path):
    """As by an experiment of one's own that was changed between two folders of runs."""
    write_run(tmp_path, "sgdm", 0)
    write_run(tmp_path, "sam", 0, task=BLEU)
    with pytest.raises(ConfigurationError, match="those of digits/mlp were evaluated by test BLEU and test accuracy;"):
        page(tmp_path)


def test_an_unfinished_run_is_listed_but_not_averaged(found):
    rows = [row for header, *rows in found.tables for row in rows if header[1]["text"] == "seed"]
    assert [cell["text"] for cell in rows[2]][:4] == ["sam", "0", "epoch 2 of 4", "–"]
    assert "sam" not in found.table("method", "last accuracy")


def test_nothing_assumes_images(tmp_path):
    """BLEU and perplexity, counted in tokens."""
    for method in ("sgdm", "llqr-ngd"):
        write_run(tmp_path, method, 0, best=34.5, task=BLEU)
    found = page(tmp_path)
    table = found.table("method", "last BLEU")
    assert table["llqr-ngd"]["last BLEU"]["text"] == "34.50"
    assert table["llqr-ngd"]["last test perplexity"]["text"] == "0.5000"
    assert {"test BLEU", "test perplexity", "train loss"} <= set(re.findall(r"(?:test|train) \w+", found.text))
    assert "100 tokens" in found.text
    assert "accuracy" not in found.text
    assert "image" not in found.text


NAMES = ["javascript:alert(1)//x", '"><img src=x onerror=alert(1)>', "a b%20c#d?e&f", r"$\\frac$ and one dollar $"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_text_in_tables_and_plots(tmp_path, name):
    """Names from files run nothing, link to nothing and break no plot."""
    folder = tmp_path / name.replace("/", "_")
    write_run(tmp_path / "made", "sgdm", 0, config={"recipe": name}, result={"recipe": name}).rename(folder)
    for file in ("config.json", "log.jsonl", "result.json"):
        text = (folder / file).read_text().replace('"sgdm"', json.dumps(name)).replace('"accuracy"', json.dumps(name))
        (folder / file).write_text(text)
    write_analysis(folder, 2.0, 1.0)
    text = report.render([stored.read(folder)], tmp_path)
    assert "<img" not in text
    assert not Page(text).links


def test_settings_in_which_methods_differ_are_shown_side_by_side(found):
    differing = found.table("setting", "sgdm")
    assert differing["geometry.structure"]["llqr-ngd+sam"]["text"] == "e-kfac"
    assert differing["probe.rho"]["sgdm"]["text"] == "–"
    assert found.table("setting", "value")["training.epochs"]["value"]["text"] == "4"
    made = found.table("", "value")
    assert (made["versions.torch"]["value"]["text"], made["commit"]["value"]["text"]) == ("2.13.0", "0123abc")


def test_every_recipe_has_its_own_section(tmp_path):
    write_run(tmp_path, "sgdm", 0)
    write_run(tmp_path, "sgdm", 0, name="cifar10/resnet18")
    found = page(tmp_path)
    assert found.text.count("sgdm ends with the best accuracy") == 2
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
    table = found.table("method", "last accuracy")
    assert list(table) == ["sam", "llqr-ngd"]  # in the requested order: times are relative to the first
    assert "time / sam" in table["sam"]
    analyses = {path.parts[-3]: json.loads(path.read_text()) for path in compared.rglob("analysis.json")}
    sharpness = {method: one["sharpness"] for method, one in analyses.items()}
    assert sharpness["sam"]["top"] == sharpness["sam"]["perceived"]
    assert sharpness["llqr-ngd"]["top"]["value"] != sharpness["llqr-ngd"]["perceived"]["value"] > 0
    assert all(one["samples"] == Task.samples_measured for one in analyses.values())
    shown = found.table("method", "top eigenvalue")["sam"]["top eigenvalue"]["text"]
    assert shown == spread(sharpness["sam"]["top"]["value"])


def test_the_measured_solution_is_the_trained_network(compared):
    folder = RunFolder(compared / "digits/mlp/llqr-ngd/seed0")
    task = folder.run().load_task(CPU)
    model, metric = solution.load(folder, task, CPU)
    with torch.no_grad():
        assert task.measure(model.eval(), "test") == folder.result()["test"]
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


def browse(path, *options):
    """The page after its scripts ran, and the output of the console."""
    quiet = ("--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-sync", *quiet, *options]
    command += [f"--user-data-dir={path.parent / 'profile'}", "--enable-logging=stderr", "--v=0", "--dump-dom"]
    done = subprocess.run([*command, path.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


# Writes down the colours of the page, of a table's heading, of a curve and of a label of its axes.
COLOURS = """
<script>
  const names = ["body", "thead th", "figure svg path[style*='#0072b2']", "figure svg text"];
  const shown = names.map((name) => getComputedStyle(document.querySelector(name)));
  document.body.dataset.wide = document.documentElement.scrollWidth > innerWidth;
  document.body.dataset.seen = [shown[0].backgroundColor, shown[0].color, shown[1].backgroundColor, shown[2].stroke,
    shown[3].fill].join("|");
</script>
"""


@pytest.mark.skipif(BROWSER is None, reason="needs chromium (apt-get install chromium)")
def test_the_page_and_its_figures_follow_the_scheme_of_the_reader(unchanged, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(report.render(find([unchanged]), tmp_path).replace("</body>", f"{COLOURS}</body>"))
    for scheme, dark in (("0", True), ("1", False)):
        dom, console = browse(path, f"--blink-settings=preferredColorScheme={scheme}", "--window-size=500,900")
        assert console == []
        assert 'data-wide="false"' in dom  # on a phone only the tables scroll sideways
        seen = re.search(r'data-seen="([^"]*)"', dom)[1].split("|")
        lightness = [sum(map(int, re.findall(r"\d+", colour)[:3])) / 3 for colour in seen]
        ground, ink, heading, curve, label = lightness
        assert (ground < 60) is dark
        assert (heading < 60) is dark
        assert min(abs(drawn - ground) for drawn in (ink, label)) > 180
        assert abs(curve - ground) > 70

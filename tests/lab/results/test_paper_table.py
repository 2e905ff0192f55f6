"""Tables: measured beside paper, what is missing, and a README that says what the results say."""

import re
from math import isnan
from pathlib import Path
from statistics import fmean, stdev

import pytest

from fake_runs import BLEU, write_run
from llqr.lab.cli import app as cli
from llqr.lab.config import recipe
from llqr.lab.config.strict import ConfigurationError
from llqr.lab.report import markdown as readme
from llqr.lab.results import measurements as results
from llqr.lab.results import tables
from llqr.lab.runs.stored import find

ROOT = Path(__file__).parents[3]


def run_cli(*arguments):
    with pytest.raises(SystemExit) as end:
        cli.main([str(argument) for argument in arguments])
    return end.value.code


def measured(folder, *runs):
    """Measurements of runs given as (recipe, method, seed, best, epochs)."""
    for number, (name, method, seed, best, epochs) in enumerate(runs):
        write_run(folder / str(number), method, seed, best=best, name=name, epochs=epochs)
    results.add(find([folder]), folder / "kept.jsonl")
    return results.read(folder)


@pytest.fixture
def two_seeds(tmp_path):
    row = "cifar100/resnet18"
    return measured(tmp_path, (row, "sam", 0, 81.0, 200), (row, "sam", 1, 81.5, 200), (row, "sgdm", 0, 79.0, 200))


def cell(table, row, column):
    (found,) = [cell for cell in table.cells.itertuples() if (cell.row, cell.method) == (row, column)]
    return found


def test_measured_stands_beside_paper(two_seeds):
    table = tables.build("cifar100", two_seeds)
    found = cell(table, "resnet18", "sam")
    assert (found.mean, found.n) == (fmean([81.0, 81.5]), 2)
    assert found.std == pytest.approx(stdev([81.0, 81.5]))
    assert (found.paper, found.paper_std, found.paper_n) == (81.13, 0.21, 5)
    assert tables.difference(table, found) == pytest.approx(0.12)
    assert found.origins == ["kept.jsonl, line 2", "kept.jsonl, line 3"]
    assert isnan(cell(table, "resnet18", "sgdm").std)
    assert len(table.missing) == len(table.cells) - 2 == 26
    missing = table.missing[table.missing["row"] == "resnet18"]["method"]
    assert list(missing) == ["llqr-ngd", "llqr-newton", "fishersam", "llqr-ngd+sam", "llqr-newton+sam"]


def test_a_run_counts_wherever_the_experiment_is_the_same(two_seeds):
    for name in ("fsam-synergy", "cifar100"):
        row = "cifar100/resnet18" if name == "fsam-synergy" else "resnet18"
        assert cell(tables.build(name, two_seeds), row, "sam").n == 2


def test_a_run_with_another_setting_counts_nowhere_and_says_why(tmp_path):
    found = measured(tmp_path, ("cifar100/resnet18", "sam", 0, 81.0, 30))
    table = tables.build("cifar100", found)
    assert table.measured.empty
    (reason,) = table.left_out
    assert "cifar100/resnet18 sam seed 0" in reason
    assert "training.epochs = 30, not 200" in reason


def test_a_run_from_before_an_option_existed_still_counts(tmp_path):
    """So that a new option of `llqr.Inner` with a default that changes nothing does not touch the kept results."""
    (found,) = measured(tmp_path, ("cifar100/resnet18", "llqr-ngd", 0, 80.0, 200))
    for table in ("inner", "runtime"):
        found.config["run"]["geometry"][table].popitem()
    assert cell(tables.build("cifar100", [found]), "resnet18", "llqr-ngd").n == 1


def test_a_variant_has_its_own_table_in_which_runs_without_a_metric_count_too(tmp_path, capsys):
    row, variant = "cifar100/resnet18", "cifar100/resnet18@diagonal"
    found = measured(
        tmp_path,
        (row, "sam", 0, 81.0, 200),
        (row, "llqr-ngd+sam", 0, 82.0, 200),
        (variant, "sam", 1, 81.5, 200),
        (variant, "llqr-ngd+sam", 0, 80.0, 200),
    )
    for name, llqr_sam in (("cifar100", 82.0), ("cifar100@diagonal", 80.0)):
        table = tables.build(name, found)
        assert table.name == name
        assert cell(table, "resnet18", "sam").n == 2
        (reason,) = table.left_out
        assert "geometry.structure" in reason
        assert cell(table, "resnet18", "llqr-ngd+sam").mean == llqr_sam
        assert run_cli("table", name, "--results", tmp_path) == 0
        assert f"{name}: top-1" in capsys.readouterr().out
    text = "<!-- table:cifar100@diagonal resnet18 -->\n<!-- /table -->\n"
    assert "| resnet18 | llqr-ngd+sam | 80.00 | 80.00 | 1 |" in readme.regenerate(text, found)


def test_the_table_of_a_variant_has_only_the_rows_that_have_it(tmp_path):
    own = "cifar100/resnet18@rho-0.1"
    found = measured(tmp_path, (own, "sam", 0, 81.0, 200), (own, "llqr-ngd+sam", 0, 82.0, 200))
    table = tables.build("cifar100@rho-0.1", found)
    assert set(table.cells["row"]) == {"resnet18"}
    assert cell(table, "resnet18", "llqr-ngd+sam").mean == 82.0


def test_columns_of_the_paper_are_shown_where_it_has_numbers(capsys):
    for name, shown in (("cifar100", True), ("iwslt14@diagonal", True), ("metric-ablation", False)):
        assert run_cli("table", name, "--results", ROOT / "results") == 0
        assert ("best - paper" in capsys.readouterr().out) is shown


def test_a_variant_that_no_recipe_has_is_refused(capsys):
    assert run_cli("table", "cifar100@longer") == 2
    assert (
        "variant must be one of short, kfac, diagonal, authors, euclidean-0.1, got 'longer'" in capsys.readouterr().err
    )
    assert run_cli("table", "storage") == 2
    assert "TABLE must be one of" in capsys.readouterr().err


def test_the_kept_runs_count_in_the_table_of_their_variant():
    kept = results.read(ROOT / "results")
    for name, row, columns in (
        ("cifar100@diagonal", "resnet18", ("sgdm", "llqr-ngd", "sam", "llqr-ngd+sam")),
        ("iwslt14@diagonal", "europarl-de-en", ("adamw", "llqr-ngd", "sam", "llqr-ngd+sam")),
    ):
        table = tables.build(name, kept)
        assert all(cell(table, row, column).n for column in columns)


def test_a_seed_counts_once(tmp_path):
    row = "cifar100/resnet18"
    again = "fishersam-ablation/cifar100/resnet18"
    found = measured(tmp_path, (row, "fishersam", 0, 80.0, 200), (again, "fishersam", 0, 81.0, 200))
    assert cell(tables.build("cifar100", found), "resnet18", "fishersam").n == 1


@pytest.mark.parametrize("name", tables.names())
def test_every_table_can_be_built_and_has_the_papers_cells(name):
    table = tables.build(name, [])
    printed = tables.paper().get(name, {"rows": {}})["rows"]
    expected = {(row, column): number for row, columns in printed.items() for column, number in columns.items()}
    compared = table.cells[table.cells["paper"].notna() & ~table.cells["row"].isin(table.caveats)]
    assert {(c.row, c.method): [c.paper, c.paper_std] for c in compared.itertuples()} == expected
    assert table.measured.empty


TRANSLATED = [
    ("adamw", 30.0, 29.0, 0.010, None),
    ("llqr-ngd", 31.0, 30.5, 0.011, None),
    ("sam", 30.5, 30.0, 0.018, 0.02),
]


def translated(folder, *runs):
    """Measurements of translation runs given as (method, validation, test, seconds a step, while probing)."""
    for method, best, tested, step, probing in runs:
        result = {"split": "valid", "test_of_best": {"BLEU": tested}, "step_seconds": step}
        result |= {} if probing is None else {"probing_step_seconds": probing}
        write_run(folder, method, 0, best=best, name="iwslt14/europarl-de-en", task=BLEU, epochs=None, result=result)
    results.add(find([folder]), folder / "kept.jsonl")
    return results.read(folder)


def test_another_corpus_stands_beside_the_papers_numbers_and_is_not_compared_with_them(tmp_path, capsys):
    measurements = translated(tmp_path, *TRANSLATED)
    table = tables.build("iwslt14", measurements)
    found = cell(table, "europarl-de-en", "llqr-ngd")
    assert (found.mean, found.test, found.paper) == (31.0, 30.5, 34.51)
    assert tables.difference(table, found) is None
    assert isnan(cell(table, "transformer_iwslt_de_en", "llqr-ngd").mean)
    assert run_cli("table", "iwslt14", "--results", tmp_path) == 0
    printed = capsys.readouterr().out
    assert "34.51 ± 0.12†" in printed
    assert "another corpus" in printed
    made = readme.markdown(table.of_rows(["europarl-de-en"]))
    assert "| europarl-de-en | llqr-ngd | 31.00 | 31.00 | 1 |  | 30.50 | 1.10x |  | 34.51 ± 0.12† | 5 |  |" in made
    assert "† europarl-de-en: Measured on Europarl" in made


def test_times_stand_beside_the_first_method_on_the_same_device_only(tmp_path):
    measurements = translated(tmp_path, *TRANSLATED)
    sam = cell(tables.build("iwslt14", measurements), "europarl-de-en", "sam")
    assert (sam.time, sam.probing_time) == (pytest.approx(1.8), pytest.approx(2.0))
    for one in measurements:
        if one.method == "sam":
            one.config["machine"]["gpu"] = "another"
    sam = cell(tables.build("iwslt14", measurements), "europarl-de-en", "sam")
    assert (sam.time, sam.probing_time) == (None, None)


def test_times_of_a_shared_device_are_left_out(tmp_path):
    measurements = translated(tmp_path, *TRANSLATED)
    for one in measurements:
        if one.method == "sam":
            one.config["machine"]["shared"] = True
    table = tables.build("iwslt14", measurements)
    sam, metric = (cell(table, "europarl-de-en", method) for method in ("sam", "llqr-ngd"))
    assert (sam.time, sam.probing_time) == (None, None)
    assert sam.test == 30.0
    assert metric.time == pytest.approx(1.1)


def test_a_run_on_a_shared_device_says_so(tmp_path, capsys):
    arguments = ["--set", "training.epochs=1", "--quiet", "--keep", tmp_path / "kept.jsonl", "--shared-device"]
    assert run_cli("train", "digits/mlp", "--method", "sgdm", "--out", tmp_path, *arguments) == 0
    assert [one.shared_device for one in results.read(tmp_path)] == [True]
    printed = capsys.readouterr().out
    assert ("last accuracy" in printed, "time / sgdm" in printed) == (True, False)


def test_every_recipe_has_a_table():
    cells = {(name, c.row, c.method) for name in tables.names() for c in tables.build(name, []).cells.itertuples()}
    for name in recipe.names():
        table, _, row = name.partition("/")
        assert {(table, row, column) for column in recipe.load(name).columns} <= cells


def test_the_command_prints_what_is_there_and_what_is_missing(tmp_path, capsys, two_seeds):
    assert run_cli("table", "cifar100", "--results", tmp_path) == 0
    printed = capsys.readouterr().out
    assert "81.25 ± 0.35" in printed
    assert "+0.12" in printed
    assert "26 of 28 cells are missing." in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["cadence"], "TABLE must be one of cifar10, cifar100"),
        ([], "TABLE or --write must be given"),
        (["cifar10", "--write", "README.md"], "TABLE or --write must be given, and not both"),
        (["--write", "missing.md"], "--write: missing.md is not there"),
    ],
)
def test_bad_arguments_are_named(capsys, arguments, said):
    assert run_cli("table", *arguments) == 2
    assert said in capsys.readouterr().err


# -- the README ------------------------------------------------------------------------------------------------------


def test_blocks_are_made_from_the_results_and_the_rest_is_left_alone(two_seeds):
    text = "before\n<!-- table:cifar100 resnet18 -->\nold | 99.99\n<!-- /table -->\nafter\n"
    made = readme.regenerate(text, two_seeds)
    assert made.startswith("before\n<!-- table:cifar100 resnet18 -->\n| | |")
    assert made.endswith("<!-- /table -->\nafter\n")
    assert "99.99" not in made
    assert "| resnet18 | sam | 81.25 ± 0.35 | 81.25 ± 0.35 | 2 | 0.0100 ± 0.0000 | 81.13 ± 0.21 | 5 | +0.12 |" in made
    assert "Not measured yet: resnet18: llqr-ngd," in made
    assert "vgg16-bn" not in made
    assert readme.regenerate(made, two_seeds) == made
    assert readme.regenerate(made, two_seeds[:1]) != made


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<!-- table:cifar10 -->", "no matching mark"),
        ("<!-- /table -->", "no matching mark"),
        ("<!-- table:a --> <!-- table:b --> <!-- /table -->", "not closed"),
        ("<!-- table:nothing --><!-- /table -->", "TABLE must be one of"),
        ("<!-- table:cifar10 lenet --><!-- /table -->", "row must be one of .*, got 'lenet'"),
    ],
)
def test_marks_that_make_no_sense_are_refused(text, said):
    with pytest.raises(ConfigurationError, match=said):
        readme.regenerate(text, [])


def test_the_command_renews_a_file(tmp_path, two_seeds):
    path = tmp_path / "README.md"
    path.write_text("<!-- table:cifar100 -->\n<!-- /table -->\n")
    assert run_cli("table", "--write", path, "--results", tmp_path) == 0
    assert "81.25 ± 0.35" in path.read_text()
    assert "Not measured yet: vgg16-bn: sgdm," in path.read_text()


PAGES = [
    str(page.relative_to(ROOT))
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if re.search("^<!-- table:", page.read_text(), flags=re.M)
]


def test_pages_with_tables_are_found():
    assert "docs/gain.md" in PAGES


@pytest.mark.parametrize("page", PAGES)
def test_the_pages_say_what_the_results_say(page):
    """If this fails, run `make tables`."""
    text = (ROOT / page).read_text()
    assert readme.regenerate(text, results.read(ROOT / "results")) == text


def test_every_table_with_measurements_is_on_a_page():
    measurements = results.read(ROOT / "results")
    recipes = {one.recipe.partition("@")[0].partition("/")[0] for one in measurements}
    with_numbers = {name for name in recipes & set(tables.names()) if len(tables.build(name, measurements).measured)}
    blocks = [block for page in PAGES for block in readme.BLOCK.finditer((ROOT / page).read_text())]
    assert with_numbers <= {block[2].partition("@")[0] for block in blocks}


def test_no_place_of_a_machine_is_in_the_results():
    for measurement in results.read(ROOT / "results"):
        commands = [measurement.config["command"], *(later["command"] for later in measurement.config["resumed"])]
        assert commands == [results.without_places(command) for command in commands], measurement.origin

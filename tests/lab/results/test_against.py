"""`llqr table --against`: differences between methods, and Welch's p beside scipy's on the same seeds."""

from math import isnan

import pytest
from scipy.stats import ttest_ind

from fake_runs import write_run
from llqr.lab.cli import app as cli
from llqr.lab.config.strict import ConfigurationError
from llqr.lab.report import markdown
from llqr.lab.results import measurements, tables
from llqr.lab.results.summary import welch
from llqr.lab.runs.stored import find

ROW = "cifar100/resnet18"
SEEDS = {"sgdm": [79.1], "sam": [81.0, 81.5, 81.3], "llqr-ngd+sam": [81.9, 82.4, 82.0], "llqr-ngd": [80.0, 80.5]}


def run_cli(*arguments):
    with pytest.raises(SystemExit) as end:
        cli.main([str(argument) for argument in arguments])
    return end.value.code


@pytest.fixture
def kept(tmp_path):
    """Made-up runs of a row; the last evaluation of each is one point below its best."""
    for method, seeds in SEEDS.items():
        for seed, best in enumerate(seeds):
            write_run(tmp_path, method, seed, best=best, name=ROW, epochs=None, result={"last": best - 1})
    measurements.add(find([tmp_path]), tmp_path / "kept.jsonl")
    return tmp_path


def comparisons(kept, reference="sam", measure="best"):
    table = tables.build("cifar100", measurements.read(kept), measure)
    return {one.method: one for one in tables.compare(table, reference).itertuples()}


def texts(kept, method):
    _, rows = tables.compared_texts(tables.compare(tables.build("cifar100", measurements.read(kept)), "sam"))
    return next(row for row in rows if row[1] == method)[2:]


def test_p_is_that_of_scipy_on_the_seeds(kept):
    found = comparisons(kept)
    for method in ("llqr-ngd+sam", "llqr-ngd"):
        expected = ttest_ind(SEEDS[method], SEEDS["sam"], equal_var=False)
        assert found[method].p == pytest.approx(expected.pvalue, rel=1e-9)
    assert found["llqr-ngd+sam"].difference == pytest.approx(82.1 - 81.26666667)
    assert found["llqr-ngd+sam"].p < 0.05


def test_one_seed_has_a_difference_and_no_p(kept):
    found = comparisons(kept)["sgdm"]
    assert found.difference == pytest.approx(79.1 - 81.26666667)
    assert isnan(found.p)
    assert texts(kept, "sgdm") == ["79.10", "1", "-2.17", ""]


def test_the_reference_is_not_compared_with_itself(kept):
    assert texts(kept, "sam")[2:] == ["", ""]


def test_without_the_reference_there_is_no_difference(kept):
    assert all(one.difference is None for one in comparisons(kept, "fishersam").values())


def test_an_alias_names_the_same_method(kept):
    assert comparisons(kept, "llqr").keys() == comparisons(kept, "llqr-ngd").keys()


def test_the_last_evaluation_may_count_instead_of_the_best(kept):
    best, last = comparisons(kept), comparisons(kept, measure="last")
    assert last["sam"].mean == pytest.approx(best["sam"].mean - 1)
    table = tables.build("cifar100", measurements.read(kept), "last")
    assert table.cells["paper"].isna().all()
    assert table.metric == "last accuracy"


@pytest.mark.parametrize("other", [90.0, 91.0])
def test_seeds_that_all_agree_have_no_p(other):
    assert welch([90.0] * 3, [other] * 3) is None


def test_the_command_prints_a_table(kept, capsys):
    assert run_cli("table", "cifar100", "--against", "sam", "--results", kept) == 0
    printed = capsys.readouterr().out
    assert "- sam" in printed
    assert "82.10 ± 0.26" in printed
    assert "+0.83" in printed
    assert "Welch" in printed


def test_a_method_that_is_no_column_is_refused(kept, capsys):
    assert run_cli("table", "cifar100", "--against", "lion", "--results", kept) == 2
    assert "against must be one of sgdm, llqr-ngd," in capsys.readouterr().err


def test_nothing_measured_is_said(tmp_path, capsys):
    assert run_cli("table", "cifar100", "--against", "sam", "--results", tmp_path) == 0
    assert "Nothing is measured yet." in capsys.readouterr().out


def test_a_markdown_block_may_show_the_differences(kept):
    text = "<!-- table:cifar100 resnet18 against=sam -->\n<!-- /table -->\n"
    made = markdown.regenerate(text, measurements.read(kept))
    p = ttest_ind(SEEDS["llqr-ngd+sam"], SEEDS["sam"], equal_var=False).pvalue
    assert "| | | measured | n | - sam | p |" in made
    assert f"| resnet18 | llqr-ngd+sam | 82.10 ± 0.26 | 3 | +0.83 | {p:.2g} |" in made
    assert "| resnet18 | sam | 81.27 ± 0.25 | 3 |  |  |" in made
    assert markdown.regenerate(made, measurements.read(kept)) == made
    last = text.replace("sam -->", "sam measure=last -->")
    assert "| 81.10 ± 0.26 | 3 | +0.83 |" in markdown.regenerate(last, measurements.read(kept))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("measure=first", "measure must be one of best, last"),
        ("versus=sam", "option must be one of against, measure, got 'versus'"),
    ],
)
def test_options_that_make_no_sense_are_refused(words, said):
    with pytest.raises(ConfigurationError, match=said):
        markdown.regenerate(f"<!-- table:cifar10 {words} -->\n<!-- /table -->\n", [])

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
SEEDS = {"sgdm": [79.1], "sam": [81.0, 81.5, 81.3], "llqr-ngd+sam": [81.9, 82.4, 82.0], "llqr-ngd": [80.0, 80.5, 80.1]}


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


def comparisons(kept, reference="sam"):
    table = tables.build("cifar100", measurements.read(kept))
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


@pytest.mark.parametrize("seeds", [1, 2])
def test_fewer_than_three_seeds_have_a_difference_and_no_p(kept, seeds):
    assert welch([79.1, 79.3][:seeds], SEEDS["sam"]) is None
    assert welch(SEEDS["sam"], [79.1, 79.3][:seeds]) is None
    found = comparisons(kept)["sgdm"]
    assert found.difference == pytest.approx(79.1 - 81.26666667)
    assert isnan(found.p)
    assert texts(kept, "sgdm") == ["78.10", "-2.17", "", "79.10", "1", "0.5000"]


def test_the_reference_is_not_compared_with_itself(kept):
    assert texts(kept, "sam")[1:3] == ["", ""]


def test_without_the_reference_there_is_no_difference(kept):
    assert all(one.difference is None for one in comparisons(kept, "fishersam").values())


def test_an_alias_names_the_same_method(kept):
    assert comparisons(kept, "llqr").keys() == comparisons(kept, "llqr-ngd").keys()


def test_last_and_best_and_the_loss_stand_side_by_side_and_the_paper_beside_the_best(kept):
    table = tables.build("cifar100", measurements.read(kept))
    headings, rows = tables.texts(table)
    assert headings == ["row", "method", "last", "best", "n", "loss", "paper", "n", "best - paper"]
    (sam,) = [row for row in rows if row[:2] == ["resnet18", "sam"]]
    assert sam[2:] == ["80.27 ± 0.25", "81.27 ± 0.25", "3", "0.5000 ± 0.0000", "81.13 ± 0.21", "5", "+0.14"]


@pytest.mark.parametrize("other", [90.0, 91.0])
def test_seeds_that_all_agree_have_no_p(other):
    assert welch([90.0] * 3, [other] * 3) is None


def test_the_command_prints_a_table(kept, capsys):
    assert run_cli("table", "cifar100", "--against", "sam", "--results", kept) == 0
    printed = capsys.readouterr().out
    assert "- sam" in printed
    assert "81.10 ± 0.26" in printed
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
    assert "| | | last | - sam | p | best | n | loss |" in made
    assert f"| resnet18 | llqr-ngd+sam | 81.10 ± 0.26 | +0.83 | {p:.2g} | 82.10 ± 0.26 | 3 | 0.5000 ± 0.0000 |" in made
    assert "| resnet18 | sam | 80.27 ± 0.25 |  |  | 81.27 ± 0.25 | 3 |" in made
    assert markdown.regenerate(made, measurements.read(kept)) == made


def test_options_that_make_no_sense_are_refused():
    with pytest.raises(ConfigurationError, match="option must be one of against, got 'versus'"):
        markdown.regenerate("<!-- table:cifar10 versus=sam -->\n<!-- /table -->\n", [])

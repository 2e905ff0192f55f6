"""The table of an experiment of one's own: every kept run counts, apart by the settings in which they differ."""

import pytest

from fake_runs import write_run
from llqr.lab.results import tables
from llqr.lab.runs import stored


def runs_of(folder):
    wanted = [(method, seed) for method in ("sgdm", "sam") for seed in (0, 1)]
    best = {(method, seed): 0.5 + seed / 10 + (method == "sam") / 5 for method, seed in wanted}
    return [stored.read(write_run(folder, *one, best=best[one], config={"recipe": "mine"})) for one in wanted]


def test_methods_are_the_cells_and_small_numbers_keep_their_digits(tmp_path):
    table = tables.build("mine", runs_of(tmp_path))
    assert [row[:3] for row in tables.texts(table)[1]] == [
        ["mine", "sgdm", "0.5500 ± 0.0707"],
        ["mine", "sam", "0.7500 ± 0.0707"],
    ]
    assert (table.metric, len(table.missing), list(table.left_out)) == ("accuracy", 0, [])
    _, sam = tables.compared_texts(tables.compare(table, "sgdm"))[1]
    assert sam[3] == "+0.2000"


def test_runs_with_other_settings_are_another_row(tmp_path):
    runs = runs_of(tmp_path)
    for run in runs:
        if run.method == "sam" and run.seed == 1:
            run.config["run"]["probe"]["rho"] = 0.3
    cells = tables.build("mine", runs).cells
    assert list(cells[["row", "method", "n"]].itertuples(index=False, name=None)) == [
        ("mine", "sgdm", 2),
        ("mine probe.rho=0.1", "sam", 1),
        ("mine probe.rho=0.3", "sam", 1),
    ]


def test_a_name_that_no_run_has_is_refused(tmp_path):
    with pytest.raises(ValueError, match="TABLE must be one of"):
        tables.build("other", runs_of(tmp_path))


def test_a_misspelt_name_is_guessed_from_the_kept_runs(tmp_path):
    with pytest.raises(ValueError, match="got 'mnie'; did you mean mine"):
        tables.build("mnie", runs_of(tmp_path))

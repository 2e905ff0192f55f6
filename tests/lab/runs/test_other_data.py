"""Text that was prepared anew under the same name: runs on the old text are not mixed with those on the new one."""

import json

import pytest
import torch

from fake_runs import BLEU, write_run
from llqr.lab.config import recipe
from llqr.lab.errors import ConfigurationError
from llqr.lab.progress import Display
from llqr.lab.results import tables
from llqr.lab.runs.planned import plan
from llqr.lab.runs.stored import find, told_apart
from llqr.lab.stop import Stop
from llqr.lab.text import prepared
from llqr.lab.training.carry_out import carry_out
from llqr.lab.training.loop import Execution
from tiny_text import reversal

NAME = "iwslt14/transformer_iwslt_de_en@tiny"
ROW = "iwslt14/europarl-de-en"


def test_a_finished_run_on_another_text_is_not_taken_for_one_on_this(tmp_path):
    texts = reversal(tmp_path / "texts", train=60)
    loaded = recipe.load(NAME, ["data.name=reversal", f'data.root="{texts}"'])
    (planned,) = plan(NAME, loaded, ["adamw"], [0], tmp_path / "runs")
    key = prepared.read(texts / "reversal")["key"]
    write_run(tmp_path / "runs", "adamw", 0, name=NAME, epochs=None, result={"text": {"key": key}})
    config = json.loads((planned.path / "config.json").read_text()) | json.loads(json.dumps(planned.to_dict()))
    (planned.path / "config.json").write_text(json.dumps(config))

    def results():
        return carry_out([planned], Execution(torch.device("cpu")), Stop(), Display(quiet=True))

    assert results()[0]["best"] == 90.0
    reversal(texts, train=60, seed=1)
    with pytest.raises(ConfigurationError, match=r"a run of iwslt14/.* on another text"):
        results()
    reversal(texts, train=60)
    assert results()[0]["best"] == 90.0
    (texts / "reversal.pt").unlink()  # a finished run can be read without its text
    assert results()[0]["best"] == 90.0


def on_texts(folder, *runs):
    """Runs given as (method, seed, best, key of the text)."""
    for number, (method, seed, best, key) in enumerate(runs):
        result = {"text": {"key": key}}
        write_run(folder / str(number), method, seed, best=best, name=ROW, task=BLEU, epochs=None, result=result)
    return find([folder])


def test_a_report_tells_them_apart(tmp_path):
    same = on_texts(tmp_path / "same", ("adamw", 0, 30.0, "a"), ("sam", 0, 31.0, "a"))
    assert [run.method for run in told_apart(same)[0]] == ["adamw", "sam"]
    write_run(tmp_path / "same", "sam", 1, name=ROW, task=BLEU, epochs=None, finished=False)
    assert [run.method for run in told_apart(find([tmp_path / "same"]))[0]] == ["adamw", "sam", "sam"]
    mixed = on_texts(tmp_path / "mixed", ("adamw", 0, 30.0, "a"), ("sam", 0, 31.0, "b"), ("sam", 0, 32.0, "a"))
    assert {(run.method, run.result["best"]) for run in told_apart(mixed)[0]} == {
        ("adamw, text=a", 30.0),
        ("sam, text=b", 31.0),
        ("sam, text=a", 32.0),
    }


def test_a_row_of_a_table_holds_the_runs_on_one_text(tmp_path):
    old, new = (("adamw", 0, 30.0, "a"), ("sam", 0, 31.0, "a")), (("adamw", 1, 99.0, "b"), ("sam", 1, 98.0, "b"))
    runs = on_texts(tmp_path, *old, *new)
    table = tables.build("iwslt14", runs)
    found = {cell.method: (cell.mean, cell.n) for cell in table.measured.itertuples()}
    assert found == {"adamw": (30.0, 1), "sam": (31.0, 1)}
    assert ["another text (b) than that of the first run of its row" in one for one in table.left_out] == [True, True]

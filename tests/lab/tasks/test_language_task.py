"""Language modelling: perplexity falls, the numbers are those of the text, and a large embedding gets a cheap block."""

import json
import math

import pytest
import torch
from torch.nn import functional as F

from llqr.lab.config import recipe
from llqr.lab.errors import DataError
from llqr.lab.progress import Display
from llqr.lab.runs.planned import explain, plan
from llqr.lab.stop import Stop
from llqr.lab.text.prepared import TokenStream
from llqr.lab.training.carry_out import carry_out
from llqr.lab.training.loop import Execution
from tiny_text import counting

CPU = torch.device("cpu")
NAME = "language/europarl-en@tiny"


def loaded_recipe(root, *overrides):
    return recipe.load(NAME, ["data.name=counting", f'data.root="{root}"', *overrides])


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return counting(tmp_path_factory.mktemp("texts"))


@pytest.mark.filterwarnings("ignore:max_side")
@pytest.mark.parametrize("method", ["adamw", "llqr-ngd+sam"])
def test_perplexity_falls_to_what_the_text_leaves_open(texts, tmp_path, method):
    """The words of a line follow from its first one: five in six are certain."""
    changes = (
        "training.steps=120",
        "training.evaluate_every=40",
        "geometries.ngd.inner.steps=3",
        "geometries.ngd.every=60",
    )
    (planned,) = plan(NAME, loaded_recipe(texts, *changes), [method], [0], tmp_path)
    (result,) = carry_out([planned], Execution(CPU), Stop(), Display(quiet=True))
    found = [json.loads(line)["valid"] for line in (planned.path / "log.jsonl").read_text().splitlines()]
    values = [record["perplexity"] for record in found]
    assert values == sorted(values, reverse=True)
    assert values[-1] < 2 < values[0]
    assert (result["metric"], result["larger_is_better"], result["best"]) == ("perplexity", False, min(values))
    assert result["test_of_best"]["perplexity"] == pytest.approx(result["best"], rel=0.2)
    assert found[-1]["token_error"] < 25


def test_the_numbers_are_those_of_every_token_but_the_first(texts):
    run = loaded_recipe(texts).run("adamw")
    task, model = run.load_task(CPU), run.build_model().eval()
    text = TokenStream.load(texts / "counting")
    tokens = text.valid.long()
    losses, wrong = [], 0
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, 32):
            window = tokens[start : start + 33]
            logits = model(window[None, :-1])[0]
            losses.append(F.cross_entropy(logits, window[1:], reduction="sum").item())
            wrong += int((logits.argmax(-1) != window[1:]).sum())
        found = task.evaluate(model)
    count = len(tokens) - 1
    assert found["loss"] == pytest.approx(sum(losses) / count, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(sum(losses) / count), rel=1e-5)
    assert found["token_error"] == pytest.approx(100 * wrong / count)
    size = len(text.subwords.decode(text.valid.tolist()).encode())
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2) * len(tokens) / size, rel=1e-6)


def test_a_large_embedding_falls_back_and_says_so(texts, tmp_path):
    loaded = loaded_recipe(texts, "geometries.ngd.runtime.max_side=128")
    lines = list(explain(plan(NAME, loaded, ["llqr-ngd"], [0], tmp_path)))
    (said,) = [line for line in lines if "stored as" in line]
    assert "e-kfac-one-sided: tokens.weight" in said
    run = loaded.run("llqr-ngd")
    task, model = run.load_task(CPU), run.build_model()
    with pytest.warns(UserWarning, match=r"max_side=128: e-kfac -> e-kfac-one-sided for tokens.weight"):
        optimizer = run.build_optimizer(model, task)
    assert optimizer.geometry.metric.kinds["tokens.weight"] == "e-kfac-one-sided"
    assert optimizer.geometry.metric.kinds["blocks.0.attention.q.weight"] == "e-kfac"


def test_patterns_choose_structures(texts, tmp_path):
    loaded = loaded_recipe(texts, 'geometries.ngd.structure={"tokens.*" = "scalar", "*" = "kfac"}')
    lines = list(explain(plan(NAME, loaded, ["llqr-ngd"], [0], tmp_path)))
    assert any("geometry.structure.tokens.* = 'scalar'" in line for line in lines)


def test_a_text_of_another_kind_is_refused(texts, tmp_path):
    with pytest.raises(DataError, match="no prepared text"):
        loaded_recipe(tmp_path).run("adamw").load_task(CPU)
    translation = recipe.load("iwslt14/transformer_iwslt_de_en@tiny", ["data.name=counting", f'data.root="{texts}"'])
    with pytest.raises(DataError, match="was prepared as a stream of text, but parallel text was expected"):
        translation.run("adamw").load_task(CPU)

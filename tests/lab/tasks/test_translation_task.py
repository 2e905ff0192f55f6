"""Translation from prepared text to BLEU: learned, measured, chosen by validation, reported, and used."""

import json
import math
import re
from itertools import islice

import pytest
import sacrebleu
import torch
from torch.nn import functional as F

from geometries import flat_geometry
from llqr.lab import report
from llqr.lab.analysis import solution
from llqr.lab.config import recipe
from llqr.lab.errors import DataError
from llqr.lab.passes import Pass, Precision
from llqr.lab.progress import Display
from llqr.lab.results import measurements as results
from llqr.lab.runs.folder import RunFolder
from llqr.lab.runs.planned import plan
from llqr.lab.runs.stored import find
from llqr.lab.stop import Stop
from llqr.lab.tasks.translation import TokenCrossEntropy, bleu, token_metrics
from llqr.lab.text.batches import token_batches
from llqr.lab.text.prepared import ParallelText
from llqr.lab.text.subwords import PAD
from llqr.lab.training.loop import Execution, Training
from tiny_text import reversal

CPU = torch.device("cpu")
NAME = "iwslt14/transformer_iwslt_de_en@tiny"


def loaded_recipe(root, *overrides):
    return recipe.load(NAME, ["data.name=reversal", f'data.root="{root}"', *overrides])


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return reversal(tmp_path_factory.mktemp("texts"), train=2000)


@pytest.fixture(scope="module")
def trained(texts, tmp_path_factory):
    """A run of LLQR+SAM to its end; with these settings the best evaluation is not the last one."""
    out = tmp_path_factory.mktemp("runs")
    settings = ("training.steps=400", "training.evaluate_every=100", "geometries.ngd.inner.steps=5")
    loaded = loaded_recipe(texts, *settings, "geometries.ngd.structure=diagonal", "probes.sam.norm=metric")
    (planned,) = plan(NAME, loaded, ["llqr-ngd+sam"], [0], out)
    folder = RunFolder(planned.path)
    folder.begin(planned, {"device": "cpu"})
    torch.manual_seed(0)
    assert Training(planned, planned.run.load_task(CPU), Execution(CPU)).run(Stop(), Display(quiet=True))
    return folder


def records_of(folder):
    return [json.loads(line) for line in (folder.path / "log.jsonl").read_text().splitlines()]


# -- learning --------------------------------------------------------------------------------------------------------


def test_a_tiny_text_is_learned(trained):
    result = trained.result()
    assert result["best"] > 90
    assert result["test_of_best"]["BLEU"] > 90
    records = records_of(trained)
    assert records[-1]["valid"]["token_error"] < records[0]["valid"]["token_error"] / 3


def test_the_log_has_an_evaluation_every_so_many_steps_whatever_the_epochs(trained, texts):
    records, result = records_of(trained), trained.result()
    assert [record["step"] for record in records] == [100, 200, 300, 400]
    an_epoch = len(token_batches(ParallelText.load(texts / "reversal").train, 512, shapes=4))
    assert 100 % an_epoch  # the evaluations do stand inside epochs
    assert [record["epoch"] for record in records] == pytest.approx([100 * i / an_epoch for i in (1, 2, 3, 4)])
    assert (result["steps"], result["counted_in"], result["split"]) == (400, "step", "valid")
    assert [[report["step"] for report in record["refreshes"]] for record in records] == [[0], [100], [200], [300]]


def test_the_result_is_that_of_the_best_evaluation_and_says_how_it_was_measured(trained, texts):
    records, result = records_of(trained), trained.result()
    found = [record["valid"]["BLEU"] for record in records]
    first_best = records[found.index(max(found))]
    assert (result["best"], result["best_step"], result["last"]) == (max(found), first_best["step"], found[-1])
    assert re.fullmatch(r"nrefs:1\|case:lc\|eff:no\|tok:13a\|smooth:exp\|version:[\d.]+", result["bleu"])
    text = ParallelText.load(texts / "reversal")
    assert result["text"]["key"] == text.key
    assert result["text"]["pairs"] == {"train": 2000, "valid": 40, "test": 40}
    assert result["seconds"]["test"] > 0


def test_the_best_weights_are_kept_and_measure_what_the_result_says(trained, texts):
    best = torch.load(trained.best, weights_only=True)
    assert best["step"] == trained.result()["best_step"]
    run = loaded_recipe(texts).run("llqr-ngd+sam")
    task, model = run.load_task(CPU), run.build_model().eval()
    model.load_state_dict(best["model"])
    with torch.no_grad():
        assert task.measure(model, "valid")["BLEU"] == trained.result()["best"]
        assert task.measure(model, "test") == trained.result()["test_of_best"]
    last = torch.load(trained.checkpoint, weights_only=True)
    assert last["best"]["step"] == best["step"]
    assert any(not torch.equal(last["model"][name], best["model"][name]) for name in best["model"])


def test_evaluation_leaves_no_trace_in_the_run(texts, tmp_path):
    """The same weights at the end, however often they were measured on the way, with dropout drawing numbers."""
    ends = []
    for every in (3, 12):
        loaded = loaded_recipe(
            texts, "training.steps=12", f"training.evaluate_every={every}", "model.options.dropout=0.3"
        )
        (planned,) = plan(NAME, loaded, ["adamw"], [0], tmp_path / str(every))
        planned.path.mkdir(parents=True)
        training = Training(planned, planned.run.load_task(CPU), Execution(CPU))
        assert training.run(Stop(), Display(quiet=True))
        ends.append(torch.nn.utils.parameters_to_vector(training.model.parameters()))
    assert torch.equal(*ends)


@pytest.mark.parametrize("method", recipe.load(NAME).methods)
def test_every_method_takes_a_step(texts, method):
    settings = ("every=2", "inner.steps=2", "batch_size=4")
    changes = [f"geometries.{name}.{setting}" for name in ("ngd", "newton") for setting in settings]
    late = [f"probes.{name}.start_after=1" for name in ("sam", "fsam", "fishersam")]
    run = loaded_recipe(texts, *changes, *late).run(method)
    task, model = run.load_task(CPU), run.build_model()
    optimizer = run.build_optimizer(model, task)
    inner = iter(task.inner_batches(4, seed=1))
    computed = Pass(task, model, Precision("fp32", CPU))
    passes = []

    def closure():
        passes.append(optimizer.steps)
        return computed()

    for batch in islice(task.train_batches(128, seed=0), 3):
        computed.load(batch)
        assert torch.isfinite(optimizer.step(closure, batch=lambda: next(inner)))
    assert passes == ([0, 1, 1, 2, 2] if run.probe else [0, 1, 2])
    if optimizer.geometry is not None:
        assert (optimizer.geometry.refreshes, optimizer.geometry.failures) == (2, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", ["adamw", "sam", "llqr-ngd+sam"])
def test_cuda_graphs_of_all_shapes_train_like_the_passes_they_captured(texts, tmp_path, method):
    device = torch.device("cuda")
    changes = ("training.steps=40", "training.evaluate_every=20", "probes.sam.start_after=3", "geometries.ngd.every=15")
    ends = []
    for capture in (False, True):
        loaded = loaded_recipe(texts, *changes)
        (planned,) = plan(NAME, loaded, [method], [0], tmp_path / str(capture))
        planned.path.mkdir(parents=True)
        training = Training(planned, planned.run.load_task(device), Execution(device, capture=capture))
        assert training.run(Stop(), Display(quiet=True))
        ends.append(torch.nn.utils.parameters_to_vector(training.model.parameters()))
    torch.testing.assert_close(*ends, rtol=1e-2, atol=1e-3)


# -- loss and metrics ------------------------------------------------------------------------------------------------


def test_the_loss_is_smoothed_and_leaves_padding_out():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, 7, generator=generator, dtype=torch.float64)
    targets = torch.tensor([[4, 5, 2, 0], [6, 2, 0, 0], [0, 0, 0, 0]])
    rows = [(logits[i, j], targets[i, j]) for i in range(3) for j in range(4) if targets[i, j] != PAD]
    each = [-(0.9 * z.log_softmax(0)[t] + 0.1 * z.log_softmax(0).mean()) for z, t in rows]
    loss = TokenCrossEntropy(ignore_index=PAD, label_smoothing=0.1)
    assert loss(logits, targets).item() == pytest.approx(sum(each).item() / len(each), rel=1e-6)


def test_the_curvature_counts_the_tokens_that_the_loss_counts():
    """A refresh on padded rows learns what one on the same rows without padding learns."""
    torch.manual_seed(0)
    model = torch.nn.Embedding(6, 5)  # logits of the next token from the token before
    loss = TokenCrossEntropy(ignore_index=PAD, label_smoothing=0.1)
    inputs, targets = torch.tensor([[1, 2, 3]]), torch.tensor([[4, 1, 2]])
    padded = torch.cat([inputs, torch.tensor([[5, 5]])], dim=1), torch.cat([targets, torch.tensor([[0, 0]])], dim=1)
    learned = []
    for batch in ((inputs, targets), padded):
        geometry = flat_geometry(model, loss, structure="diagonal", lr=0.1, steps=5, ema=0.0)
        geometry.refresh(batch)
        learned.append(geometry.metric.named_factors()["weight"])
    torch.testing.assert_close(*learned)
    assert not torch.allclose(learned[0], torch.ones_like(learned[0]), atol=1e-3)


def test_token_error_and_perplexity_are_those_of_the_real_tokens():
    logits = torch.tensor([[[9.0, 0, 0], [0, 9, 0], [0, 0, 9]], [[0, 9, 0], [0, 0, 9], [9, 0, 0]]])
    targets = torch.tensor([[1, 1, 2], [1, 0, 0]])
    found = token_metrics([(logits, targets)], CPU)
    assert found["token_error"] == pytest.approx(25.0)
    real = [(logits[i, j], targets[i, j]) for i, j in ((0, 0), (0, 1), (0, 2), (1, 0))]
    expected = sum(F.cross_entropy(z, t).item() for z, t in real) / 4
    assert found["loss"] == pytest.approx(expected, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(expected), rel=1e-6)


def test_bleu_is_sacrebleus_and_ignores_case_where_the_text_is_in_lower_case():
    references = ["The cat sat on the mat today .", "It rained all of yesterday, and it did."]
    translations = ["the cat sat on the mat today .", "it rained all of today, and it did."]
    for lowercase in (True, False):
        expected = sacrebleu.corpus_bleu(translations, [references], lowercase=lowercase).score
        assert bleu(references, lowercase).corpus_score(translations, None).score == pytest.approx(expected)
    ignoring, minding = (bleu(references, lowercase).corpus_score(translations, None) for lowercase in (True, False))
    assert ignoring.score > minding.score


def test_bleu_is_measured_on_detokenised_text_against_what_was_written(texts):
    """Perfect translations score 100 in spite of subwords, and the references are not the tokens."""
    task = loaded_recipe(texts).run("adamw").load_task(CPU)
    perfect = [task.text.detokenise(task.text.valid.target[i]) for i in range(40)]
    assert task._bleu["valid"].corpus_score(perfect, None).score == pytest.approx(100)
    assert task._bleu["valid"].corpus_score(perfect[::-1], None).score < 60


# -- what is missing or does not fit ---------------------------------------------------------------------------------


def test_a_text_that_is_not_prepared_is_named(tmp_path):
    with pytest.raises(DataError, match=r"no prepared text .*; prepare it with: llqr data reversal"):
        loaded_recipe(tmp_path).run("adamw").load_task(CPU)


def test_a_run_is_not_resumed_with_other_data(texts, tmp_path):
    loaded = loaded_recipe(texts, "training.steps=4", "training.evaluate_every=2")
    (planned,) = plan(NAME, loaded, ["adamw"], [0], tmp_path)
    planned.path.mkdir(parents=True)
    training = Training(planned, planned.run.load_task(CPU), Execution(CPU))
    state = training.state_dict()
    other = loaded_recipe(reversal(tmp_path / "other", seed=1, train=2000)).run("adamw").load_task(CPU)
    with pytest.raises(ValueError, match=r"it was trained on [0-9a-f]+, and the data are now [0-9a-f]+"):
        Training(planned, other, Execution(CPU)).load_state_dict(state)


# -- what becomes of a run -------------------------------------------------------------------------------------------


def test_the_report_shows_bleu_and_token_error_against_steps_and_time(trained):
    page = report.render(find([trained.path]), trained.path)
    captions = re.findall('aria-label="(.*?)"', page)
    for metric in ("BLEU", "token error"):
        assert {f"valid {metric}", f"valid {metric} over time"} <= set(captions)
    assert {">step<", ">minutes<"} <= set(re.findall(r">step<|>minutes<", page))
    assert trained.result()["bleu"] in page
    assert "test BLEU of the best" in page


def test_the_solution_is_measured_with_padding_left_out(trained, texts):
    task = trained.run().load_task(CPU)
    found = solution.analyse(trained, task, CPU, samples=24)
    assert found["samples"] == 24
    assert found["sharpness"]["top"]["value"] > 0
    batch, _ = task.samples(24, solution.SAMPLES_SEED)
    model = solution.load(trained, task, CPU)[0].eval()
    with torch.no_grad():
        assert found["loss"] == pytest.approx(task.loss(task.forward(model, batch[0]), batch[1]).item(), rel=1e-4)


def test_a_kept_run_has_its_test_metric(trained, tmp_path):
    results.add(find([trained.path]), tmp_path / "kept.jsonl")
    (kept,) = results.read(tmp_path)
    assert kept.tested == trained.result()["test_of_best"]["BLEU"]

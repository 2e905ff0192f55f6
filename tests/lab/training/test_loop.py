"""The training loop: it does what its parts say, logs what happened, and knows nothing of the task."""

import dataclasses
import json
import math
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import llqr
from geometries import flat_geometry
from llqr.lab import tasks
from llqr.lab.config import recipe
from llqr.lab.config.settings import Choice, LrSchedule, Probe
from llqr.lab.data import Batches
from llqr.lab.errors import Diverged
from llqr.lab.passes import CapturedPass, Pass, Precision
from llqr.lab.progress import Display
from llqr.lab.runs.planned import PlannedRun, plan
from llqr.lab.stop import Stop
from llqr.lab.tasks.classification import ClassificationTask
from llqr.lab.tasks.task import Task, TaskOptions
from llqr.lab.training.carry_out import carry_out
from llqr.lab.training.loop import Execution, Training, independent_seeds
from llqr.lab.training.results import seconds_per_step

CPU = torch.device("cpu")
SHORT = [
    "training.epochs=2",
    "geometries.ngd.every=10",
    "geometries.ngd.inner.steps=3",
    "geometries.newton.inner.steps=3",
]


def train(folder, method, *overrides, seed=0, capture=False):
    loaded = recipe.load("digits/mlp", [*SHORT, *overrides])
    (planned,) = plan("digits/mlp", loaded, [method], [seed], folder)
    planned.path.mkdir(parents=True)
    training = Training(planned, planned.run.load_task(CPU), Execution(CPU, capture=capture))
    assert training.run(Stop(), Display(quiet=True))
    return training


def weights(training):
    return torch.nn.utils.parameters_to_vector(training.model.parameters()).detach()


def test_inverse_sqrt_falls_from_the_end_of_the_warm_up_whatever_the_length():
    schedule = LrSchedule("inverse-sqrt", warmup_steps=4000)
    assert schedule.factor(0, 10) == 1 / 4000
    assert schedule.factor(3999, 10) == 1.0
    assert schedule.factor(4 * 4000 - 1, 10) == schedule.factor(4 * 4000 - 1, 10**6) == 0.5
    with pytest.raises(ValueError, match="warmup_steps must be at least 1 with inverse-sqrt"):
        LrSchedule("inverse-sqrt")


def test_cosine_goes_from_the_base_rate_to_zero_after_a_linear_warm_up():
    schedule = LrSchedule("cosine", warmup_steps=4)
    assert [schedule.factor(step, 104) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert schedule.factor(4, 104) == 1.0
    assert schedule.factor(54, 104) == pytest.approx(0.5)
    assert schedule.factor(104, 104) == pytest.approx(0.0)
    assert LrSchedule("constant").factor(77, 104) == 1.0


def test_steps_multiply_the_rate_at_fractions_of_the_run():
    schedule = LrSchedule("steps", warmup_steps=2, milestones=(0.5, 0.75), decay=0.2)
    expected = [0.5, 1.0, 1.0, 1.0, 0.2, 0.2, 0.04, 0.04]
    assert [schedule.factor(step, 8) for step in range(8)] == pytest.approx(expected)
    for wrong in ({"name": "steps"}, {"name": "cosine", "milestones": (0.5,)}):
        with pytest.raises(ValueError, match="milestones belong to steps"):
            LrSchedule(**wrong)
    with pytest.raises(ValueError, match="milestones must be fractions of the run"):
        LrSchedule("steps", milestones=(0.5, 30))


def test_the_loop_is_the_loop_one_would_write_by_hand(tmp_path):
    training = train(tmp_path, "llqr-ngd+sam")
    loaded = recipe.load("digits/mlp", SHORT)
    run = loaded.run("llqr-ngd+sam")
    task = run.load_task(CPU)
    model_seed, order_seed, inner_seed = independent_seeds(0, 3)
    torch.manual_seed(model_seed)
    model = run.build_model()
    geometry = flat_geometry(model, F.cross_entropy, structure="e-kfac", every=10, steps=3, ema=0.95)
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    optimizer = llqr.LLQRSAM(base, geometry, rho=0.1, norm="metric")
    inner = iter(task.train_batches(128, inner_seed))
    batches = task.train_batches(64, order_seed)
    step = 0
    for _ in range(2):
        for x, y in batches:
            base.param_groups[0]["lr"] = 0.05 * 0.5 * (1 + math.cos(math.pi * step / 46))

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure, batch=lambda: next(inner))
            step += 1
    assert geometry.refreshes == 5
    assert torch.equal(weights(training), torch.nn.utils.parameters_to_vector(model.parameters()))


def test_a_seed_decides_the_run(tmp_path):
    first, same, other = (train(tmp_path / str(i), "sam", seed=seed) for i, seed in enumerate((3, 3, 4)))
    assert torch.equal(weights(first), weights(same))
    assert not torch.allclose(weights(first), weights(other))


def test_log_and_result_say_what_happened(tmp_path):
    training = train(tmp_path, "llqr-ngd", "training.epochs=3")
    folder = tmp_path / "digits/mlp/llqr-ngd/seed0"
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    result = json.loads((folder / "result.json").read_text())
    assert [record["epoch"] for record in records] == [1, 2, 3]
    assert [record["step"] for record in records] == [23, 46, 69]
    assert [record["lr"] for record in records] == pytest.approx([0.05, 0.0375, 0.0125])
    assert [[report["step"] for report in record["refreshes"]] for record in records] == [
        [0, 10, 20],
        [30, 40],
        [50, 60],
    ]
    assert all(report["accepted"] for record in records for report in record["refreshes"])
    report = records[0]["refreshes"][0]
    assert report["objective_after"] < report["objective_before"]
    accuracies = [record["test"]["accuracy"] for record in records]
    assert result["best"] == max(accuracies)
    assert accuracies[result["best_epoch"] - 1] == max(accuracies)
    assert result["last"] == accuracies[-1] == training.measure("test")["accuracy"]
    assert (result["refreshes"], result["refreshes_rejected"]) == (7, 0)
    assert result["seconds"]["total"] == pytest.approx(
        sum(record["seconds"]["train"] + record["seconds"]["eval"] for record in records)
    )
    assert records[-1]["train"]["loss"] < records[0]["train"]["loss"]


def test_evaluations_and_length_may_be_counted_in_steps(tmp_path):
    """An epoch has 23 steps here; what is computed does not depend on when it is measured."""
    training = train(tmp_path / "steps", "sam", "training.steps=50", "training.evaluate_every=20")
    records = training.folder.log.records
    assert [record["step"] for record in records] == [20, 40, 50]
    assert [record["epoch"] for record in records] == pytest.approx([20 / 23, 40 / 23, 50 / 23])
    run = training.planned.run
    rates = [run.base.lr * run.schedule.factor(step, 50) for step in (0, 20, 40)]
    assert [record["lr"] for record in records] == pytest.approx(rates)
    assert training.finished
    result = training.folder.result()
    assert (result["steps"], result["counted_in"], result["best_step"] in (20, 40, 50)) == (50, "step", True)
    whole = train(tmp_path / "whole", "sam", "training.steps=50")
    assert [record["step"] for record in whole.folder.log.records] == [23, 46, 50]
    assert torch.equal(weights(training), weights(whole))
    mean = sum(record["train"]["loss"] * steps for record, steps in zip(records, (20, 20, 10), strict=True)) / 50
    others = zip(whole.folder.log.records, (23, 23, 4), strict=True)
    assert mean == pytest.approx(sum(record["train"]["loss"] * steps for record, steps in others) / 50)


def test_the_time_of_a_step_leaves_out_the_first_interval_and_those_before_the_probe():
    records = [
        {"step": step, "seconds": {"train": seconds}} for step, seconds in ((10, 9.0), (20, 1.0), (30, 2.0), (35, 2.0))
    ]
    assert seconds_per_step(records) == pytest.approx(5.0 / 25)
    assert seconds_per_step(records, since=15) == pytest.approx(4.0 / 15)
    assert seconds_per_step(records, since=30) == pytest.approx(2.0 / 5)
    assert seconds_per_step(records, since=31) is None
    assert seconds_per_step(records[:1]) == pytest.approx(0.9)


def test_the_rate_is_what_was_trained_on_in_the_time_that_it_took(tmp_path):
    training = train(tmp_path, "sgdm")
    result, records = training.folder.result(), training.folder.log.records
    seconds = sum(record["seconds"]["train"] for record in records[1:])
    count = (records[-1]["step"] - records[0]["step"]) * training.planned.run.training.batch_size
    assert result["rate"] == pytest.approx(count / seconds, rel=1e-6)


def test_a_metric_that_is_no_number_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(ClassificationTask, "measure", lambda self, model, split: {"accuracy": math.nan})
    with pytest.raises(Diverged, match="digits/mlp sgdm seed 0: the test accuracy of epoch 1 is nan"):
        train(tmp_path, "sgdm")


@pytest.mark.parametrize("most", [1, 64])
@pytest.mark.parametrize("method", ["sgdm", "llqr-ngd+sam"])
def test_a_captured_pass_computes_what_an_uncaptured_one_does(method, most):
    """On a network with BatchNorm, with a smaller last batch, and with the capture replaced by plain repetition.

    Each of the two shapes is captured once, unless only one graph may be kept.
    """
    loaded = recipe.load("digits/mlp", [*SHORT, "model.name=cnn", "training.last=keep", "training.batch_size=100"])
    run = loaded.run(method)
    task = run.load_task(CPU)
    captured = []

    def remember(compute):
        captured.append(compute)

        def replay():
            model.zero_grad(set_to_none=False)  # as a graph does, which overwrites the gradients
            return compute()

        return replay

    ends = []
    for make in (Pass, lambda *parts: CapturedPass(*parts, capture=remember, most=most)):
        torch.manual_seed(0)
        model = run.build_model()
        optimizer = run.build_optimizer(model, task)
        closure = make(task, model, Precision("fp32", CPU))
        losses = []
        for batch in task.train_batches(100, seed=1):
            closure.load(batch)
            losses.append(optimizer.step(closure, batch=batch))
        ends.append(torch.cat([*(p.flatten().float() for p in model.state_dict().values()), torch.stack(losses)]))
    assert len(captured) == min(2, most)
    assert torch.equal(*ends)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("most", [1, 2, 8])
def test_cuda_graphs_of_several_shapes_share_gradients_and_memory(most):
    """Batches of three shapes in turn, some of them uncaptured where only a few graphs are kept."""
    device = torch.device("cuda")
    run, precision = recipe.load("digits/mlp").run("sgdm"), Precision("fp32", device)
    task = run.load_task(device)
    torch.manual_seed(0)
    model = run.build_model().to(device)
    passes = Pass(task, model, precision), CapturedPass(task, model, precision, most=most)
    images, labels = next(iter(task.train_batches(64, seed=0)))
    for rows in (64, 32, 48, 32, 64, 48, 64):
        found = []
        for one in passes[::-1]:
            written = [parameter.grad for parameter in model.parameters()]
            one.load((images[-rows:], labels[-rows:]))
            loss = one().clone()
            found.append(torch.cat([loss.view(1), *(p.grad.flatten().clone() for p in model.parameters())]))
        for parameter, gradient in zip(model.parameters(), written, strict=True):
            parameter.grad = gradient  # the memory of the graphs: the pass that was not captured made gradients anew
        torch.testing.assert_close(*found)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", ["sgdm", "sam", "llqr-ngd+sam"])
def test_a_cuda_graph_trains_like_the_passes_it_captured(tmp_path, method, monkeypatch):
    device = torch.device("cuda")
    # cuDNN would time its algorithms in each run anew and choose others, which round differently.
    monkeypatch.setattr(Precision, "set_up", lambda self: None)
    for flag, value in {"benchmark": False, "deterministic": True, "allow_tf32": False}.items():
        monkeypatch.setattr(torch.backends.cudnn, flag, value)
    loaded = recipe.load("digits/mlp", [*SHORT, "model.name=cnn", "training.channels_last=true", "training.last=keep"])
    ends = []
    for capture in (False, True):
        (planned,) = plan("digits/cnn", loaded, [method], [0], tmp_path / str(capture))
        planned.path.mkdir(parents=True)
        training = Training(planned, planned.run.load_task(device), Execution(device, capture=capture))
        assert training.run(Stop(), Display(quiet=True))
        ends.append(torch.cat([p.flatten().double() for p in training.model.state_dict().values()]))
    torch.testing.assert_close(*ends, rtol=1e-3, atol=1e-4)


def test_bf16_computes_in_bf16_and_keeps_weights_in_float32(tmp_path):
    training = train(tmp_path, "sam", "training.precision=bf16")
    assert {p.dtype for p in training.model.parameters()} == {torch.float32}
    with training.precision.autocast():
        assert training.model(torch.zeros(1, 1, 8, 8)).dtype == torch.bfloat16
    full = train(tmp_path / "full", "sam")
    assert not torch.equal(weights(full), weights(training))
    assert training.folder.log.records[-1]["test"]["accuracy"] > 80


def test_a_loss_that_is_no_number_ends_the_run(tmp_path):
    with pytest.raises(Diverged, match="digits/mlp sgdm seed 0: the training loss of epoch 1 is"):
        train(tmp_path, "sgdm", "bases.sgdm.lr=1e12")


def test_a_run_that_diverged_is_freed_before_the_next_begins(tmp_path, monkeypatch):
    """Its graphs and tensors are in reference cycles, which Python collects when it likes."""
    made, alive = [], []
    make = Training.__init__

    def remembered(self, *arguments):
        alive.extend(one for one in made if one() is not None)
        make(self, *arguments)
        made.append(weakref.ref(self))

    monkeypatch.setattr(Training, "__init__", remembered)
    loaded = recipe.load("digits/mlp", ["training.epochs=1", "bases.sgdm.lr=1e12"])
    planned = plan("digits/mlp", loaded, ["sgdm", "sam", "adam"], [0], tmp_path)
    with pytest.raises(Diverged, match="digits/mlp sam seed 0: the training loss of epoch 1 is"):
        carry_out(planned, Execution(CPU), Stop(), Display(quiet=True))
    assert (len(made), alive) == (3, [])


class Points(Batches):
    """Batches of a mapping with two tensors, and one target."""

    def _draw(self, total):
        pass

    def _produce(self, order, first):
        x = torch.linspace(-1, 1, self.count)
        for samples in order.split(self.batch_size)[first:]:
            yield {"x": x[samples, None], "scale": torch.full((len(samples), 1), 2.0)}, 3 * x[samples, None]


class Regression(Task):
    metric, larger_is_better, unit = "error", False, "points"

    @classmethod
    def data_options(cls, name):
        return TaskOptions

    @classmethod
    def build_model(cls, run):
        return nn.Linear(1, 1)

    @classmethod
    def load(cls, run, device, seed):
        return cls()

    def place(self, model):
        return model

    def train_batches(self, batch_size, seed):
        return Points(96, batch_size, seed=seed, last="fill")

    def forward(self, model, inputs):
        return model(inputs["x"] * inputs["scale"])

    def loss(self, outputs, targets):
        return F.mse_loss(outputs, targets)

    def size(self, batch):
        return len(batch[1])

    def measure(self, model, split):
        return {"error": (model.weight - 1.5).abs().item()}


@pytest.mark.parametrize("capture", [False, True])
def test_a_new_task_is_one_class_in_the_registry_and_needs_no_other_loop(tmp_path, monkeypatch, capture):
    """Inputs that are a mapping, a metric that is better when smaller, and no classes anywhere."""
    monkeypatch.setattr("llqr.lab.passes.CudaGraphs", lambda model: lambda compute: compute)
    digits = recipe.load("digits/mlp", ["training.batch_size=8", "bases.sgdm.weight_decay=0", "training.epochs=4"])
    monkeypatch.setitem(tasks.TASKS, "regression", Regression)
    run = dataclasses.replace(digits.run("sam"), task=Choice("regression"), probe=Probe("sam", rho=0.01))
    planned = PlannedRun("line", "Line", run, 0, tmp_path)
    training = Training(planned, run.load_task(CPU), Execution(CPU, capture=capture))
    assert training.run(Stop(), Display(quiet=True))
    result = training.folder.result()
    errors = [record["test"]["error"] for record in training.folder.log.records]
    assert (result["metric"], result["unit"], result["steps"]) == ("error", "points", 48)
    assert result["best"] == min(errors) < 0.05 < errors[0]

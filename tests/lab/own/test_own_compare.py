"""Methods compared on your own model and data: from a file or a program; resumed, reported, kept."""

import inspect
import json
import random
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import llqr as library
from llqr.lab import Experiment, compare
from llqr.lab.errors import ConfigurationError, DataError, Diverged, Stopped
from llqr.lab.own.experiment import of_seed
from llqr.lab.stop import Stop

FILE = """
import torch
from torch import nn
from llqr.lab import Experiment

x = torch.randn(48, 6)  # the same in every process: modules are imported with a seed
y = x[:, :3].argmax(1)


def experiment():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3))
    return Experiment(
        model=model, loss=nn.functional.cross_entropy, train=(x[:32], y[:32]), test=(x[32:], y[32:]),
        epochs=2, batch_size=8,
    )
"""
QUICK = ("--methods", "sgdm,llqr+sam", "--seeds", "1", "--device", "cpu", "--set", "geometries.ngd.inner.steps=2")
FAST = {"geometries.ngd.inner.steps": 2}


@pytest.fixture(autouse=True)
def _without_git(monkeypatch):
    monkeypatch.setenv("LLQR_COMMIT", "none")


def classes(count=32, seed=0):
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return x, x[:, :3].argmax(1)


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def given(**changes):
    return {
        "model": network,
        "loss": nn.functional.cross_entropy,
        "train": classes(),
        "test": classes(16, 1),
        "epochs": 2,
        "batch_size": 8,
        "settings": FAST,
        "quiet": True,
        "device": "cpu",
        "seeds": 1,
        "samples": 0,
    } | changes


def test_a_file_is_compared_resumed_reported_and_kept(llqr, tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    code, out, err = llqr("compare", "mine.py", *QUICK, "--keep", "kept/mine.jsonl")
    assert (code, "best accuracy" in out, "llqr-ngd+sam" in out) == (0, True, True)
    assert "kept/mine.jsonl: 2 added" in err
    folder = tmp_path / "runs/mine/llqr-ngd+sam/seed0"
    assert json.loads((folder / "analysis.json").read_text())["sharpness"]["top"]["value"] > 0
    page = (tmp_path / "runs/report.html").read_text()
    assert "llqr-ngd+sam" in page
    kept = json.loads((tmp_path / "kept/mine.jsonl").read_text().splitlines()[0])
    assert str(tmp_path) not in json.dumps(kept)

    code, _, err = llqr("train", "mine.py", "--method", "sgdm", "--device", "cpu")
    assert (code, "mine sgdm seed 0: already done" in err) == (0, True)
    code, out, _ = llqr("table", "mine", "--results", "kept", "--against", "sgdm")
    assert (code, "llqr-ngd+sam" in out, "- sgdm" in out) == (0, True, True)


class Everywhere(library.SAMProbe):
    """Follows the signs of the gradient."""

    name = "everywhere"

    def __init__(self, rho):
        super().__init__(rho)

    def filtered(self, point):
        return [g.sign() for g in point.grads]


class SignDescent(library.inner.Solver):
    name = "sign"

    def step(self, objective):
        here = objective.at(self.factors)
        for own, slopes in zip(self.factors, here.slopes(), strict=True):
            for name, slope in slopes.items():
                own[name] -= self.lr * slope.sign()
        return here.value


def test_a_probe_and_a_solver_of_ones_own_are_known_by_their_names(monkeypatch):
    monkeypatch.setitem(library.PROBES, "everywhere", Everywhere)
    monkeypatch.setitem(library.SOLVERS, "sign", SignDescent)
    settings = FAST | {"geometries.ngd.inner.solver": "sign", "probes.everywhere.rho": 0.01}
    found = compare(**given(methods=["sgdm", "everywhere", "llqr-ngd+everywhere"], settings=settings))
    assert [row["method"] for row in found.rows()] == ["sgdm", "everywhere", "llqr-ngd+everywhere"]


PARTS = f"\nimport llqr as library\n\n{inspect.getsource(SignDescent)}\nlibrary.SOLVERS['own-sign'] = SignDescent\n"


def test_kept_runs_and_run_folders_are_read_without_the_code_they_were_made_with(llqr, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(FILE + PARTS)
    signs = ("--set", "geometries.ngd.inner.solver=own-sign")
    assert llqr("compare", "mine.py", *QUICK, *signs, "--keep", "kept/mine.jsonl")[0] == 0
    monkeypatch.delitem(library.SOLVERS, "own-sign")
    monkeypatch.setattr("llqr.lab.own.experiment.held", {})
    of_seed.cache_clear()
    for file in (tmp_path / "runs").rglob("analysis.json"):
        file.unlink()
    (tmp_path / "mine.py").write_text("from pathlib import Path; Path('harmed').touch()")
    for command in (("table", "mine", "--results", "kept"), ("report", "runs"), ("report", "runs", "--samples", "8")):
        code, out, err = llqr(*command)
        assert (code, err) == (0, "")
        assert "llqr-ngd+sam" in (out if command[0] == "table" else (tmp_path / "runs/report.html").read_text())
    assert not (tmp_path / "harmed").exists()


def test_runs_before_one_whose_code_raises_are_kept(llqr, tmp_path):
    (tmp_path / "mine.py").write_text(FILE.replace("def experiment():", "def experiment(seed):\n    assert seed == 0"))
    with pytest.raises(AssertionError):
        llqr("compare", "mine.py", *QUICK, "--methods", "sgdm", "--seeds", "2", "--keep", "kept.jsonl")
    assert json.loads((tmp_path / "kept.jsonl").read_text())["seed"] == 0


@pytest.mark.parametrize("draws", ["torch", "numpy"])
def test_the_seed_decides_the_weights_and_all_methods_start_from_the_same(draws, tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    still = {"bases.sgdm.lr": 0.0, "training.epochs": 1}
    how = {"methods": ["sgdm", "sam"], "seeds": 2, "settings": still, "device": "cpu", "samples": 0, "quiet": True}

    def drawn():
        model = network()
        with torch.no_grad():
            model[0].weight.fill_(random.random() + np.random.rand())  # noqa: NPY002
        return model

    found = compare(tmp_path / "mine.py", **how) if draws == "torch" else compare(**given(model=drawn) | how)
    for seed in (0, 1):
        assert torch.equal(found.model("sgdm", seed)[0].weight, found.model("sam", seed)[0].weight)
    assert not torch.equal(found.model("sgdm", 0)[0].weight, found.model("sgdm", 1)[0].weight)


def test_arrays_are_taken_as_tensors():
    train, test = ([part.numpy() for part in data] for data in (classes(), classes(16, 1)))
    found, same = (compare(**given(methods=["sgdm"], **data)) for data in ({"train": train, "test": test}, {}))
    assert found.runs[0].result["last"] == same.runs[0].result["last"]


def test_another_function_of_a_file_a_dry_run_and_one_training(llqr, tmp_path):
    (tmp_path / "goods.py").write_text(FILE.replace("def experiment()", "def small(seed)"))
    code, out, _ = llqr("compare", "goods.py:small", "--dry-run", "--set", "probes.sam.rho=0.3", "--device", "cpu")
    assert code == 0
    for line in ("training.epochs = 2", "probe.rho = 0.3", "# 83 parameters, 8 steps, seeds 0, 1, 2"):
        assert line in out
    assert llqr("train", "goods.py:small", "--method", "sam", "--seed", "1", "--device", "cpu", "--quiet")[0] == 0
    assert (tmp_path / "runs/goods-small/sam/seed1/result.json").exists()


def test_a_run_that_is_stopped_and_resumed_ends_as_an_uninterrupted_one(llqr, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(FILE)
    arguments = ("train", "mine.py", "--method", "llqr+sam", "--device", "cpu", "--quiet")
    assert llqr(*arguments, "--out", "whole")[0] == 0
    asked = iter([False] * 7)
    with monkeypatch.context() as patch:
        patch.setattr(Stop, "requested", property(lambda self: next(asked, True)))
        patch.setattr(Stop, "reason", "the test", raising=False)
        assert llqr(*arguments, "--out", "parts")[0] == 75
    assert llqr(*arguments, "--out", "parts")[0] == 0
    ends = [torch.load(tmp_path / f"{out}/mine/llqr-ngd+sam/seed0/checkpoint.pt") for out in ("whole", "parts")]
    assert all(torch.equal(one, other) for one, other in zip(*(end["model"].values() for end in ends), strict=True))
    losses = [[record["train"]["loss"] for record in end["log"]] for end in ends]
    assert losses[0] == losses[1]


def noisy(batch):
    """Draws from the global generator, as an augmentation does."""
    x, y = torch.utils.data.default_collate(batch)
    return {"input": x + 0.1 * torch.randn(x.shape), "labels": y}


LOADERS = {
    "shuffled": lambda: DataLoader(TensorDataset(*classes()), 8, shuffle=True),
    "augmented": lambda: DataLoader(TensorDataset(*classes()), 8, shuffle=True, collate_fn=noisy),
    "in order": lambda: DataLoader(TensorDataset(*classes()), 8),
}


@pytest.mark.parametrize(
    "kind", [kind if kind == "augmented" else pytest.param(kind, marks=pytest.mark.slow) for kind in LOADERS]
)
def test_every_kind_of_loader_is_resumed_exactly(kind, tmp_path, monkeypatch):
    torch.manual_seed(0)
    loader = LOADERS[kind]()
    arguments = given(train=loader, methods=["llqr+sam"], batch_size=None)
    whole = compare(**arguments, out=tmp_path / "whole")
    asked = iter([False] * 7)
    with monkeypatch.context() as patch:
        patch.setattr(Stop, "requested", property(lambda self: next(asked, True)))
        with pytest.raises(Stopped, match="The folder is out="):
            compare(**arguments, out=tmp_path / "parts")
    torch.rand(5)  # the state of the global generator does not matter
    parts = compare(**arguments, out=tmp_path / "parts")
    assert whole.runs[0].result["steps"] == 8
    for one, other in zip(whole.model("llqr+sam").parameters(), parts.model("llqr+sam").parameters(), strict=True):
        assert torch.equal(one, other)
    assert [r["train"] for r in whole.runs[0].records] == [r["train"] for r in parts.runs[0].records]


def test_where_the_other_runs_are_is_said_if_one_diverges():
    settings = {"bases.sgdm.lr": 1e38, "training.epochs": 10}
    diverging = given(model=lambda: nn.Linear(6, 3), methods=["sgdm", "adam"], seeds=1, samples=0, settings=settings)
    with pytest.raises(Diverged, match=r"sgdm seed 0: the training loss of .* The folder is out='") as error:
        compare(**diverging)
    folder = Path(str(error.value).partition("out=")[2].strip("'."))
    assert (folder / "experiment/adam/seed0/result.json").exists()


def test_a_program_gets_a_table_that_shows_itself_with_its_runs():
    found = compare(**given(methods="sgdm,sam", seeds=2, samples=16))
    assert [run.label for run in found.runs] == [
        "experiment sgdm seed 0",
        "experiment sam seed 0",
        "experiment sgdm seed 1",
        "experiment sam seed 1",
    ]
    assert repr(found.runs[0]) == f"StoredRun('{found.runs[0].path}', finished)"
    first, second = found.rows()
    last = [run.result["last"] for run in found.runs if run.method == "sam"]
    assert second["last accuracy"] == pytest.approx(sum(last) / 2)
    assert second["- sgdm"] == pytest.approx(second["last accuracy"] - first["last accuracy"])
    assert second["top eigenvalue"] > 0
    text, page = str(found), found._repr_html_()
    assert text.splitlines()[0].split()[:3] == ["method", "last", "accuracy"]
    assert re.search(r"^ *sam +\d+(\.\d+)? +\d", text, flags=re.M)
    assert page.count("<tr") == 3
    assert isinstance(found.model("sam", 1), nn.Sequential)


def test_a_network_that_is_given_as_it_is_starts_every_run_and_stays_as_it_was():
    model = network()
    before = [p.clone() for p in model.parameters()]
    found = compare(**given(model=model, methods=["sgdm"], seeds=2, lr=0.0, weight_decay=0.0))
    compare(**given(model=nn.Linear(6, 3), methods=["sgdm"]))  # of the same name
    for seed in (0, 1):
        assert all(map(torch.equal, before, found.model("sgdm", seed).parameters()))
    assert all(map(torch.equal, before, model.parameters()))


def line(count=32, seed=0):
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return x, x.sum(1, keepdim=True)


def r2(outputs, targets):
    return 1 - ((outputs - targets) ** 2).sum() / ((targets - targets.mean()) ** 2).sum()


def test_regression_is_measured_by_its_loss_or_by_a_metric_of_ones_own():
    regression = {"model": nn.Linear(6, 1), "loss": nn.MSELoss(), "train": line(), "test": line(20, 1)}
    found = compare(**given(**regression, methods=["sgdm", "llqr+sam"]))
    result = found.runs[0].result
    assert (result["metric"], result["larger_is_better"]) == ("loss", False)
    x, y = regression["test"]
    assert result["last"] == pytest.approx(nn.functional.mse_loss(found.model("sgdm")(x), y).item(), rel=1e-5)
    measured = compare(**given(**regression, methods=["sgdm"], metric=r2, larger_is_better=True))
    result = measured.runs[0].result
    assert result["metric"] == "r2"
    assert result["last"] == pytest.approx(r2(measured.model("sgdm")(x), y).item(), rel=1e-5)


def test_a_metric_of_ones_own_that_is_called_loss():
    def loss(outputs, targets):
        return 1 - (outputs.argmax(1) == targets).float().mean()

    result = compare(**given(methods=["sgdm"], metric=loss, larger_is_better=False)).runs[0].result
    assert result["metric"] == "metric"
    assert result["last"] <= 1 < result["test"]["loss"] + 1
    with pytest.raises(ConfigurationError, match="larger_is_better must be True or False"):
        compare(**given(metric=loss, larger_is_better="no"))


def test_one_output_for_two_classes_is_measured_by_the_loss():
    """The largest of one output is always the first: an accuracy would be the share of class 0."""
    x, y = classes()

    def loss(outputs, targets):
        return nn.functional.binary_cross_entropy_with_logits(outputs[:, 0], targets.float())

    binary = {"model": nn.Linear(6, 1), "loss": loss, "train": (x, (y > 0).long()), "test": (x, (y > 0).long())}
    result = compare(**given(**binary, methods=["sgdm"], epochs=1)).runs[0].result
    assert (result["metric"], list(result["test"])) == ("loss", ["loss"])


def test_sharpness_is_measured_on_fewer_samples_than_asked_for_where_whole_batches_are_made():
    train = DataLoader(TensorDataset(*classes(20)), 8, shuffle=True, drop_last=True)
    found = compare(**given(train=train, batch_size=None, methods=["sgdm"], epochs=1, samples=512))
    assert found.runs[0].analysis["samples"] == 20


def test_a_validation_set_chooses_the_weights_that_are_tested():
    regression = {"model": nn.Linear(6, 1), "loss": nn.MSELoss(), "train": line(), "test": line(20, 1)}
    found = compare(**given(**regression, methods=["sgdm"], metric=r2, larger_is_better=True, valid=line(16, 2)))
    result, x, y = found.runs[0].result, *regression["test"]
    assert (result["metric"], result["split"]) == ("r2", "valid")
    assert result["best"] == result["last"]  # so that the last weights are those that were tested
    assert result["test_of_best"]["r2"] == pytest.approx(r2(found.model("sgdm")(x), y).item(), rel=1e-5)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(10, 4), nn.Linear(4, 3)

    def forward(self, tokens, mask):
        return self.head((self.words(tokens) * mask[..., None]).sum(1))


def test_batches_may_be_mappings():
    tokens, labels = torch.randint(10, (24, 5)), torch.randint(3, (24,))
    samples = [{"tokens": t, "mask": torch.ones(5), "labels": y} for t, y in zip(tokens, labels, strict=True)]
    loader = DataLoader(samples, 8, shuffle=True)
    found = compare(**given(model=Reader, train=loader, test=loader, methods=["llqr+sam"], batch_size=None))
    assert found.runs[0].result["metric"] == "accuracy"


def test_classes_along_either_axis_are_refused():
    x, y = torch.randn(8, 3, 6), torch.randint(3, (8, 3))
    model, loss = nn.Linear(6, 3), lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten())
    with pytest.raises(ConfigurationError, match="metric must be given: axis 1 of the outputs and the last one"):
        compare(**given(model=model, loss=loss, train=(x, y), test=(x, y), methods=["sgdm"]))


WEIGHTS = {"weight": torch.tensor([1.0, 5.0, 0.2])}


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(**WEIGHTS),
        nn.CrossEntropyLoss(ignore_index=1),
        partial(F.cross_entropy, **WEIGHTS),
        partial(F.cross_entropy, ignore_index=1),
        nn.MultiMarginLoss(**WEIGHTS),  # no weighted mean
    ],
)
def test_the_test_loss_does_not_depend_on_how_the_data_are_divided(loss):
    found = [
        compare(**given(loss=loss, methods=["sgdm"], settings={"training.eval_batch_size": size})).runs[0]
        for size in (5, 16)
    ]
    once, at_once = (run.result["test"]["loss"] for run in found)
    assert once == pytest.approx(at_once)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss, nn.BCEWithLogitsLoss])
def test_a_loss_with_weights_takes_targets_that_are_no_classes(loss):
    x, y = classes()
    data = x, nn.functional.one_hot(y, 3).float()
    (run,) = compare(**given(loss=loss(weight=torch.arange(3.0)), train=data, test=data, methods=["sgdm"])).runs
    assert run.result["metric"] == "loss"


@pytest.mark.parametrize("weight", [None, torch.ones(5)])
def test_the_test_loss_counts_the_targets_that_a_loss_says_it_counts(weight):
    """That of a language model leaves out the first place of a row, where some rows here have no target anyway."""
    tokens = torch.randint(5, (16, 4), generator=torch.Generator().manual_seed(0))
    targets = tokens.masked_fill(torch.arange(16)[:, None] >= torch.tensor([12, 16, 16, 8]), -100)
    loss = library.ShiftedCrossEntropy()
    loss.weight = weight
    task = {"model": lambda: nn.Embedding(5, 5), "loss": loss}
    data = {"train": (tokens, targets), "test": (tokens, targets)}
    found = [
        compare(**given(**task, **data, methods=["sgdm"], settings={"training.eval_batch_size": size})).runs[0]
        for size in (5, 16)
    ]
    in_parts, at_once = (run.result["test"]["loss"] for run in found)
    assert in_parts == pytest.approx(at_once)


def test_an_object_is_known_only_to_the_program_that_has_it():
    with pytest.raises(DataError, match=r"gone#1 was given to .* as an object, which only that program has"):
        of_seed("gone#1", 0)


def test_a_resumed_comparison_measures_its_own_experiment(tmp_path, monkeypatch):
    """In another program, which compares another experiment first."""
    here = given(methods=["sgdm"], out=tmp_path / "mine")
    compare(**here)
    monkeypatch.setattr("llqr.lab.own.experiment.held", {})
    of_seed.cache_clear()
    compare(**given(methods=["sgdm"], train=classes(24, 2), out=tmp_path / "other"))
    found = compare(**here | {"samples": 96})
    assert found.runs[0].analysis["samples"] == 32
    assert len(found.model("sgdm")) == 3


def test_an_experiment_may_be_given_as_one(tmp_path):
    experiment = Experiment(
        model=network, loss=nn.functional.cross_entropy, train=classes(), test=classes(16, 1), epochs=1, name="mine"
    )
    found = compare(experiment, methods=["sgdm"], seeds=1, quiet=True, device="cpu", samples=0)
    assert found.runs[0].recipe == "mine"


class Watched(nn.Conv2d):
    """Notes the memory format of what it is given and of its weights."""

    seen: set[tuple[bool, bool]] = set()

    def forward(self, image):
        self.seen.add(tuple(one.is_contiguous(memory_format=torch.channels_last) for one in (image, self.weight)))
        return super().forward(image).mean((2, 3))


def test_channels_last_is_how_images_and_weights_lie_in_memory():
    data = TensorDataset(torch.randn(8, 3, 4, 4), torch.arange(8) % 2)
    quick = {"epochs": 1, "methods": ["llqr+sam"], "seeds": 1, "device": "cpu", "samples": 0}
    for setting in (False, True):
        Watched.seen = set()
        settings = {"training.channels_last": setting, "geometries.ngd.inner.steps": 2}
        given = {"model": Watched(3, 2, 3), "loss": nn.functional.cross_entropy, "train": data, "test": data}
        compare(**given, **quick, settings=settings, quiet=True)
        assert Watched.seen == {(setting, setting)}

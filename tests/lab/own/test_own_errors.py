"""What a user gets wrong in an experiment is one sentence that names it and the way out."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from llqr.lab import Experiment, compare
from llqr.lab.cli.app import main
from llqr.lab.config.strict import ConfigurationError

HEAD = """import torch
from torch import nn
from llqr.lab import Experiment
x, y = torch.randn(16, 4), torch.randint(3, (16,))
"""
BODY = "    return Experiment(model=nn.Linear(4, 3), loss=nn.functional.cross_entropy, train=(x, y), test=(x, y))\n"


@pytest.fixture
def sentence(capsys, tmp_path, monkeypatch):
    """What a command says on stderr, and its exit code."""
    monkeypatch.chdir(tmp_path)

    def run(text, *arguments):
        (tmp_path / "mine.py").write_text(text)
        with pytest.raises(SystemExit) as exit_:
            main(["compare", *(arguments or ("mine.py",)), "--device", "cpu", "--quiet"])
        return exit_.value.code, capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (HEAD + "def build():\n" + BODY, "mine.py has no function experiment; it has build: write mine.py:build."),
        (
            HEAD + "def experiment():\n    return 3\n",
            "experiment() in mine.py must return an llqr.lab.Experiment, got int.",
        ),
        (
            HEAD + "def experiment(a, b):\n" + BODY,
            "experiment() in mine.py must take nothing, or seed, got the arguments a, b.",
        ),
        (HEAD + "def experiment(:\n", "mine.py, line 5: invalid syntax: def experiment(:"),
        (HEAD + "import no_such_module\n", "mine.py, line 5: ModuleNotFoundError: No module named 'no_such_module'"),
        (
            HEAD + "def experiment():\n    x.no_such()\n",
            "mine.py, line 6: AttributeError: 'Tensor' object has no attribute 'no_such'",
        ),
        (
            HEAD + "def experiment():\n" + BODY.replace("nn.Linear(4, 3)", "nn.LazyLinear(3)"),
            "model: weight has no shape yet (a lazy module); call the model on a batch first.",
        ),
        (
            HEAD + "def experiment():\n" + BODY.replace("nn.Linear(4, 3)", "torch.compile(nn.Linear(4, 3))"),
            "model is what torch.compile returned; give the network itself, and --compile.",
        ),
        (
            HEAD + "def experiment():\n" + BODY.replace("loss=nn.functional.cross_entropy", "loss=3"),
            "mine.py, line 6: loss must be a function, got int.",
        ),
    ],
)
def test_a_file_that_cannot_be_used(sentence, text, expected):
    assert sentence(text) == (2, f"llqr: {expected}\n")


def test_names_that_do_not_exist(sentence):
    good = HEAD + "def experiment():\n" + BODY
    assert sentence(good, "gone.py")[0] == 3
    code, err = sentence(good, "no.such.module:experiment")
    assert (code, err.startswith("llqr: There is no module no")) == (2, True)
    code, err = sentence(good, "mine.py", "--methods", "sgdm,lqr+sam")
    assert (code, "got 'lqr+sam'; did you mean llqr-ngd+sam?" in err) == (2, True)
    code, err = sentence(good, "mine.py", "--data-dir", "x")
    assert (code, "--data-dir belongs to built-in data sets" in err) == (2, True)
    code, err = sentence(good, "mine.py", "--set", "training.epoch=3")
    assert (code, "--set training.epoch=3: unknown key training.epoch" in err) == (2, True)
    for ignored in ("model.name=resnet18", "data.options.image_size=3", "task.name=own2"):
        code, err = sentence(good, "mine.py", "--set", ignored)
        part = ignored.partition(".")[0]
        assert (code, f"{part} is what the experiment gives; change it there" in err) == (2, True)


def pair(count=16):
    return torch.randn(count, 4), torch.randint(3, (count,))


def batches():
    yield pair()


class Loop(nn.Module):
    """Holds a tensor that does not move with it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 3))
        self.hidden = torch.ones(3, device="meta")

    def forward(self, x):
        return x @ self.weight + self.hidden


class Two(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"loss": lambda z, y: z},
            r"loss must return one number, the mean over the batch, got a tensor of shape \(16, 3\)",
        ),
        ({"loss": lambda z, y: 1.0}, "loss must return one number, the mean over the batch, got float"),
        ({"loss": nn.CrossEntropyLoss(reduction="sum")}, "loss must be the mean over the batch, got a sum"),
        ({"loss": nn.functional.mse_loss}, "loss cannot be computed on a batch of train"),
        (
            {"train": batches()},
            "train is a generator, which can be read only once; give the DataLoader or the list itself",
        ),
        ({"test": iter([pair()])}, "test is a list_iterator, which can be read only once"),
        ({"train": []}, "train is empty"),
        ({"train": pair(0)}, "train is empty"),
        ({"test": DataLoader(TensorDataset(*pair(3)), 8, drop_last=True)}, "test gave no batch"),
        ({"train": None}, "train must be a Dataset, a DataLoader or a list of batches, got None"),
        ({"train": (torch.ones(3, 4), torch.ones(2))}, "train has 3 inputs and 2 targets"),
        ({"train": [torch.ones(3, 4)]}, r"expected \(inputs, targets\), a mapping with targets.*collate_fn"),
        ({"train": [{"x": torch.ones(3, 4)}]}, "a mapping needs one of the keys targets, labels"),
        ({"model": 3}, "model must be an nn.Module or a function, got int"),
        ({"model": lambda: 3}, r"model\(\) must return an nn.Module, got int"),
        ({"model": nn.Linear(5, 3)}, "model cannot be called on a batch of train .RuntimeError: .*mat1 and mat2"),
        ({"model": Two(4, 3)}, "model must return a tensor, got tuple; give forward"),
        ({"model": Loop}, "model cannot be called on a batch of train .*meta"),
        ({"model": nn.Linear(4, 3, device="meta")}, "model cannot be moved to cpu"),
        ({"model": nn.Flatten()}, "model has no parameter that requires a gradient"),
        ({"metric": lambda z, y: 1.0}, "larger_is_better must be True or False with a metric of your own"),
        ({"metric": lambda z, y: z, "larger_is_better": True}, "metric must be one number, got Tensor"),
        (
            {"evaluate": lambda m, b: 3, "larger_is_better": True},
            "evaluate must return a dict of numbers by name, got int",
        ),
        ({"train": {"x": torch.ones(8, 4), "y": torch.ones(8).long()}}, "train is a mapping, which may be a batch"),
        (
            {"evaluate": lambda model, batches: {}, "larger_is_better": True},
            "evaluate must return a dict of numbers by name, got {}",
        ),
        ({"base": "lion"}, "base must be one of sgdm, adam, adamw, got 'lion'"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"methods": ["sma"]}, "methods must be one of .*, got 'sma'; did you mean sam"),
        ({"structure": {"nowhere*": "kfac"}}, "geometries.ngd: .*nowhere"),
        ({"name": "../away"}, "name names a folder"),
        ({"settings": {"training.epoch": 3}}, "^settings: unknown key training.epoch; .* did you mean epochs"),
        (
            {"train": (torch.randn(300, 4), torch.arange(300) // 299 * 3)},
            "train has the class 3, but the model has 3 outputs, of the classes 0 to 2",
        ),
        ({"test": (torch.randn(300, 4), torch.arange(300) // 299 * -1)}, "test has the class -1"),
        (
            {"loss": nn.MSELoss(), "model": nn.Linear(4, 1), "train": (torch.randn(8, 4), torch.randn(8))},
            r"loss cannot be computed on a batch of train \(UserWarning: Using a target size \(torch.Size\(\[8\]",
        ),
        (
            {"train": DataLoader(TensorDataset(*pair(8)), 9, shuffle=True, drop_last=True)},
            r"batch_size must be at most the 8 samples of the data, .* \(training.last=drop\), got 9",
        ),
        ({"seeds": 0}, "seeds must be how many, at least 1, got 0"),
        ({"seeds": [1, 2]}, r"seeds must be how many, at least 1, got \[1, 2\]"),
        ({"train": [pair(8)], "batch_size": 4}, "batch_size must be 8, as the loader makes them, got 4"),
    ],
)
def test_what_a_program_gives(changes, expected):
    given = {
        "model": nn.Linear(4, 3),
        "loss": nn.functional.cross_entropy,
        "train": pair(),
        "test": pair(),
        "epochs": 1,
    }
    with pytest.raises(ConfigurationError, match=expected):
        compare(**given | {"seeds": 1, "device": "cpu", "quiet": True, "samples": 0} | changes)


def test_arguments_of_compare():
    with pytest.raises(TypeError, match="loss: must be given"):
        compare(model=nn.Linear(4, 3))
    with pytest.raises(TypeError, match="epoch: no argument of compare, and none of Experiment"):
        compare(model=nn.Linear(4, 3), epoch=3)
    with pytest.raises(TypeError, match=r"lr: not with 'mine\.py'; settings can change it"):
        compare("mine.py", lr=0.1)
    with pytest.raises(ConfigurationError, match="experiment must be a Python file"):
        compare("mine")
    with pytest.raises(TypeError, match="expected an Experiment or the name of a file, got int"):
        compare(3)


def test_a_loss_with_parameters_is_refused():
    with pytest.raises(ConfigurationError, match="loss has parameters"):
        Experiment(model=nn.Linear(4, 3), loss=nn.Linear(3, 1), train=pair(), test=pair())


def test_two_files_of_one_name_are_refused(llqr, tmp_path):
    """Their runs would share a folder, and only one of them would be made."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.toml").write_text('extends = "digits/mlp"\n')
    code, _, err = llqr("compare", "a/mine.toml", "b/mine.toml", "--dry-run")
    assert (code, err) == (2, "llqr: RECIPE: a/mine.toml and b/mine.toml are both filed under mine; rename one.\n")
    assert llqr("compare", "a/mine.toml", "a/mine.toml", "--dry-run")[0] == 0

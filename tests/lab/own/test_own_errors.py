"""What a user gets wrong in an experiment is one sentence that names it and the way out."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from llqr.lab import Experiment, compare
from llqr.lab.cli.app import main
from llqr.lab.errors import ConfigurationError

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


def test_a_file_that_cannot_be_used(sentence):
    code, err = sentence(HEAD + "def build():\n" + BODY)
    assert (code, err) == (2, "llqr: mine.py has no function experiment.\n")
    code, err = sentence(HEAD + "def experiment():\n    return 3\n")
    assert (code, "must return an llqr.lab.Experiment, got int" in err) == (2, True)


def test_names_that_do_not_exist(sentence):
    good = HEAD + "def experiment():\n" + BODY
    assert sentence(good, "gone.py")[0] == 3
    code, err = sentence(good, "mine.py", "--methods", "sgdm,lqr+sam")
    assert (code, "got 'lqr+sam'; did you mean llqr-ngd+sam?" in err) == (2, True)
    code, err = sentence(good, "mine.py", "--data-dir", "x")
    assert (code, "--data-dir belongs to built-in data sets" in err) == (2, True)
    code, err = sentence(good, "mine.py", "--sweep", "probes.sam.rho=0.1,0.2")
    assert (code, "give data.options.validation, such as" in err, "or valid= in an" in err) == (2, True, True)
    code, err = sentence(good, "mine.py", "--set", "training.epoch=3")
    assert (code, "mine: unknown key training.epoch" in err) == (2, True)
    code, err = sentence(good, "mine.py", "--set", "model.name=resnet18")
    assert (code, "model is what the experiment gives; change it there" in err) == (2, True)


def pair(count=16):
    return torch.randn(count, 4), torch.randint(3, (count,))


def batches():
    yield pair()


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(*pair(), strict=True))

    def __len__(self):
        return 16


weighted = DataLoader(TensorDataset(*pair()), 8, sampler=WeightedRandomSampler(torch.ones(16), 16))


class Two(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"loss": lambda z, y: z}, "loss must return one number, the mean over the batch"),
        ({"loss": nn.CrossEntropyLoss(reduction="sum")}, "loss must be the mean over the batch, got a sum"),
        ({"train": batches()}, "train: pass the data set, a pair of tensors, or a DataLoader that only shuffles"),
        ({"train": [pair(8)]}, "train: pass the data set, .*, got list"),
        ({"train": Stream()}, "train: pass the data set, .*, got Stream"),
        ({"train": DataLoader(Stream(), 8)}, "train: pass the data set, .*, got DataLoader"),
        ({"test": weighted}, "test: pass the data set, .*, got DataLoader"),
        ({"train": TensorDataset(*pair(0))}, "train is empty"),
        ({"train": None}, "train: pass the data set, .*, got NoneType"),
        ({"train": (torch.ones(3, 4), torch.ones(2))}, "train has 3 inputs and 2 targets"),
        ({"model": 3}, "model must be a function or an nn.Module, got int"),
        ({"model": lambda: 3}, r"model\(\) must return an nn.Module, got int"),
        ({"model": Two(4, 3)}, "model must return a tensor, got tuple; give forward"),
        ({"metric": lambda z, y: 1.0}, "larger_is_better must be True or False with a metric of your own"),
        ({"base": "lion"}, "base must be one of sgdm, adam, adamw, got 'lion'"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"methods": ["sma"]}, "methods must be one of .*, got 'sma'; did you mean sam"),
        ({"structure": {"nowhere*": "kfac"}}, "geometries.ngd: .*nowhere"),
        ({"name": "../away"}, "name names a folder"),
        ({"settings": {"training.epoch": 3}}, "^experiment: unknown key training.epoch; .* did you mean epochs"),
        ({"seeds": 0}, "seeds must be how many, at least 1, got 0"),
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
    with pytest.raises(TypeError, match="missing 3 required keyword-only arguments: 'loss', 'train', and 'test'"):
        compare(model=nn.Linear(4, 3))
    with pytest.raises(TypeError, match="unexpected keyword argument 'epoch'"):
        compare(model=nn.Linear(4, 3), epoch=3)
    with pytest.raises(ConfigurationError, match="experiment must be a Python file"):
        compare("mine")


def test_a_loss_with_parameters_is_refused():
    with pytest.raises(ConfigurationError, match="loss has parameters"):
        Experiment(model=nn.Linear(4, 3), loss=nn.Linear(3, 1), train=pair(), test=pair())


def test_two_files_of_one_name_are_refused(llqr, tmp_path):
    """Their runs would share a folder, and only one of them would be made."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.toml").write_text('extends = "digits/mlp"\n')
    code, _, err = llqr("compare", "a/mine.toml", "b/mine.toml", "--dry-run")
    assert (code, err) == (2, "llqr: RECIPE: two recipes are filed under mine; rename one.\n")


def test_a_file_that_was_mended_is_read_again(tmp_path, monkeypatch):
    """In a notebook, whose process has imported the wrong one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mended.py").write_text(HEAD + "def experiment():\n    return 3\n")
    with pytest.raises(ConfigurationError, match=r"must return an llqr.lab.Experiment, got int"):
        compare("mended.py")
    (tmp_path / "mended.py").write_text(HEAD + "def experiment():\n" + BODY)
    with pytest.raises(ConfigurationError, match=r"methods must be one of .* got 'none'"):  # the experiment is fine
        compare("mended.py", methods=["none"])

"""A run on two ranks is the run of one process, leaves the same files, and is resumed on another number of ranks.

All batches have odd sizes, so that the ranks' shares differ.
"""

import io
import json
import os
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import nn

from double_task import DoubleTask
from llqr.lab import tasks
from llqr.lab.cli import app
from llqr.lab.config import recipe
from llqr.lab.config.strict import ConfigurationError
from llqr.lab.errors import CannotWrite, DataError, Diverged, Stopped
from llqr.lab.passes import Precision
from llqr.lab.progress import Display
from llqr.lab.ranks import launch
from llqr.lab.ranks.strategy import STRATEGIES, SharedPass, share
from llqr.lab.ranks.team import FailureElsewhere, Team
from llqr.lab.runs.folder import RunFolder
from llqr.lab.runs.planned import plan
from llqr.lab.stop import Stop
from llqr.lab.tasks.translation import TokenCrossEntropy
from llqr.lab.training.carry_out import carry_out
from llqr.lab.training.loop import Execution
from processes import on_ranks
from resumed_runs import StopAfter, timeless

CPU = torch.device("cpu")
STEPS = 6
SETTINGS = [
    f"training.steps={STEPS}",
    "training.evaluate_every=3",
    "training.batch_size=25",
    "model.options.hidden=[12]",
    "geometries.ngd.every=3",
    "geometries.ngd.inner.steps=3",
    "geometries.ngd.batch_size=33",
]
#: Name -> strategy, method, and how it is carried out.
CASES = {
    "sam": ("ddp", "sam", {}),
    "llqr": ("ddp", "llqr-ngd+sam", {}),
    "llqr shared out": ("ddp", "llqr-ngd+sam", {"shards": "all"}),
    "sam on shards": ("fsdp2", "sam", {}),
    "llqr on shards": ("fsdp2", "llqr-ngd+sam", {}),
}
METHODS = ("sgdm", "sam", "llqr-ngd+sam")
#: By ranks from its beginning to its end; or begun by one process, continued by ranks, and ended by one process.
WAYS = ("whole", "relay")
FEW = [("llqr", "whole"), ("llqr shared out", "relay"), ("llqr on shards", "relay")]


@cache
def loaded():
    return recipe.load("digits/mlp", SETTINGS)


def planned_in(folder, method):
    (planned,) = plan("digits/mlp", loaded(), [method], [0], folder)
    return planned


def make(planned, execution, stop=None):
    (result,) = carry_out([planned], execution, stop or Stop(), Display(quiet=True))
    return result


def failure(action):
    """The kind of error, and what it says or the code that it leaves with."""
    try:
        action()
    except Exception as error:
        return [type(error).__name__, error.code if isinstance(error, FailureElsewhere) else str(error)]
    return []


class NoNumber(DoubleTask):
    def loss(self, outputs, targets):
        return super().loss(outputs, targets) * torch.nan


def work(folder, runs, chosen, rank, world):
    """All that the ranks do, in one start; ``runs`` by method and without a folder, as planning takes seconds."""

    def planned_in(folder, method):
        return replace(runs[method], path=folder / runs[method].path)

    tasks.TASKS["classification"] = DoubleTask
    strategies = {name: kind() for name, kind in STRATEGIES.items()}
    ranks = Execution(CPU, strategy=strategies["ddp"])
    found = {"stopped": []}
    for case, way in chosen:
        strategy, method, options = CASES[case]
        planned = planned_in(folder / case / way, method)
        made = Execution(CPU, strategy=strategies[strategy], **options)
        if way == "whole":
            make(planned, made)
        else:
            stop = StopAfter(2 if rank == 1 else 10 * STEPS)  # only one of the ranks is asked to
            found["stopped"].append(failure(partial(make, planned, made, stop)))
    found |= commanded(folder, rank, world)
    tasks.TASKS["classification"] = NoNumber if rank == 1 else DoubleTask
    found["diverged"] = failure(lambda: make(planned_in(folder / "diverged", "sgdm"), ranks))
    found["locked"] = failure(lambda: make(planned_in(folder / "locked", "sgdm"), ranks))
    team = ranks.strategy.team
    found["one of all"] = failure(lambda: team.by_all(lambda: fail(DataError("gone")) if rank == 1 else None))
    found["the first"] = failure(lambda: team.by_first(lambda: fail(CannotWrite("full"))))
    found["statistics"] = failure(lambda: ranks.strategy.prepare(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))))
    found["in step"] = team.by_first(lambda: "as the first says") == "as the first says"
    return found


def commanded(folder, rank, world):
    """What the commands that make or read a report leave with and say, as torchrun starts them."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    settings = [part for change in SETTINGS for part in ("--set", change)]
    where = ["--out", str(folder / "compared"), "--device", "cpu"]
    compared = ["compare", "digits/mlp", "--methods", "sgdm,llqr-ngd+sam", "--seeds", "1", "--strategy", "ddp", *where]
    commands = {"compared": [*compared, *settings], "reported": ["report", str(folder)]}
    found = {}
    for name, command in commands.items():
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            try:
                app.main(command)
            except SystemExit as left:
                found[name] = [left.code, out.getvalue(), err.getvalue()]
    return found


def fail(error):
    raise error


def made_by(count, folder, chosen):
    """What these ranks found; before them one process made every run, and began some for them to continue."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tasks.TASKS, "classification", DoubleTask)
        for method in METHODS[1:]:
            make(planned_in(folder / "alone", method), Execution(CPU))
        relays = [planned_in(folder / case / way, CASES[case][1]) for case, way in chosen if way == "relay"]
        for planned in relays:
            with pytest.raises(Stopped):
                make(planned, Execution(CPU), StopAfter(3))
        with RunFolder(planned_in(folder / "locked", "sgdm").path).locked():
            runs = {method: planned_in(Path(), method) for method in METHODS}
            found = on_ranks(count, folder, partial(work, folder, runs, chosen))
        for planned in relays:
            make(planned, Execution(CPU))
    return folder, found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return made_by(2, tmp_path_factory.mktemp("ranks"), FEW)


def end(folder, method):
    """Weights, metric, position in the data, and log of a finished run."""
    path = planned_in(folder, method).path
    state = torch.load(path / "checkpoint.pt", weights_only=True)
    own = state["optimizer"]["llqr"]["geometry"]
    numbers = {"weights": dict(state["model"]), "metric": {} if own is None else dict(own["metric"]["factors"])}
    log = [timeless(json.loads(line)) for line in (path / "log.jsonl").read_text().splitlines()]
    position = [str(state[loader]) for loader in ("batches", "inner")]
    return numbers, position, log, json.loads((path / "result.json").read_text())


@pytest.mark.parametrize(("case", "way"), FEW)
def test_a_run_equals_that_of_one_process(ranks, case, way):
    assert_same_run(ranks[0], case, way)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_every_case_equals_one_process(tmp_path, count):
    chosen = [(case, way) for case in CASES for way in WAYS]
    made_by(count, tmp_path, chosen)
    for case, way in chosen:
        assert_same_run(tmp_path, case, way)


def assert_same_run(folder, case, way):
    method = CASES[case][1]
    numbers, position, log, result = end(folder / case / way, method)
    expected, expected_position, expected_log, expected_result = end(folder / "alone", method)
    assert bool(expected["metric"]) == ("llqr" in case)
    torch.testing.assert_close(numbers, expected, rtol=1e-12, atol=1e-13)
    assert position == expected_position
    assert len(log) == len(expected_log) == 2
    assert all(_close(one, other) for one, other in zip(log, expected_log, strict=True))
    assert result.keys() == expected_result.keys()
    assert result["best"] == expected_result["best"]
    assert result["metric_fallbacks"] == expected_result["metric_fallbacks"]
    assert _close(result["layers"], expected_result["layers"])


def _close(one, other):
    """Numbers to rounding, everything else exactly."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_close(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_close, one, other))
    return one == pytest.approx(other, rel=1e-10) if isinstance(one, float) else one == other


def test_one_folder_says_what_made_it(ranks):
    folder, _ = ranks
    path = planned_in(folder / "llqr shared out/relay", "llqr-ngd+sam").path
    began = json.loads((path / "config.json").read_text())
    assert "strategy" not in began["machine"]
    first, second = (resumed["machine"] for resumed in began["resumed"])
    assert [first[key] for key in ("strategy", "ranks", "shards")] == ["ddp", 2, "all"]
    assert "strategy" not in second
    assert {file.name for file in path.iterdir()} == {
        ".lock",
        "checkpoint.pt",
        "config.json",
        "log.jsonl",
        "result.json",
    }


def test_ranks_stop_and_fail_together(ranks):
    _, (first, second) = ranks
    assert len(first["stopped"]) == 2
    for kind, sentence in first["stopped"] + second["stopped"]:
        assert kind == Stopped.__name__
        assert "stopped by a test after 4 of 6 steps" in sentence, "two by one process, and two by the ranks"
    assert first["diverged"] == second["diverged"]
    assert first["diverged"][0] == Diverged.__name__
    assert first["locked"][0] == ConfigurationError.__name__
    assert "is in use by another process" in first["locked"][1]
    assert second["locked"] == [FailureElsewhere.__name__, 2]
    assert first["one of all"] == [FailureElsewhere.__name__, 3]
    assert second["one of all"] == [DataError.__name__, "gone"]
    assert first["the first"] == [CannotWrite.__name__, "full"]
    assert second["the first"] == [FailureElsewhere.__name__, 73]
    assert "the network has BatchNorm" in first["statistics"][1]
    assert first["in step"]
    assert second["in step"]


def test_the_first_rank_reports_on_a_comparison(ranks):
    folder, (first, second) = ranks
    code, table, said = first["compared"]
    assert code == 0, said
    assert "llqr-ngd+sam" in table
    assert "report.html" in said
    assert second["compared"] == [0, "", ""]
    assert (folder / "compared/report.html").exists()
    assert len(list((folder / "compared").glob("digits/mlp/*/seed0/analysis.json"))) == 2


def test_a_command_for_one_process_is_refused_on_several(ranks):
    _, found = ranks
    sentence = "llqr report works in one process, and WORLD_SIZE says that there are 2: start it without torchrun."
    assert [rank["reported"] for rank in found] == 2 * [[2, "", f"llqr: {sentence}\n"]]


class Place(Team):
    def __init__(self, rank, size):
        self.rank, self.size = rank, size


def test_shares_make_up_the_batch_and_a_batch_that_is_too_small_is_refused():
    batch = {"x": torch.arange(7), "scale": torch.ones(())}, torch.arange(7) * 10
    shares = [share(batch, Place(rank, 3)) for rank in range(3)]
    assert [len(targets) for _, targets in shares] == [3, 2, 2]
    assert sorted(torch.cat([inputs["x"] for inputs, _ in shares]).tolist()) == list(range(7))
    assert all(targets.equal(inputs["x"] * 10) and inputs["scale"] == 1 for inputs, targets in shares)
    with pytest.raises(ConfigurationError, match="a batch of 7 samples cannot be shared out among 8 ranks"):
        share(batch, Place(0, 8))


class Tokens:
    loss = TokenCrossEntropy(ignore_index=0, label_smoothing=0.1)

    def forward(self, model, inputs):
        return model(inputs)


def test_the_mean_of_the_ranks_is_that_of_all_tokens_even_if_a_share_is_all_padding():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5)).double()
    targets = torch.tensor([[1, 2, 3], [4, 0, 0], [0, 0, 0]])
    batch = torch.randint(5, (3, 3)), targets

    def gradients(closure):
        model.zero_grad()
        closure.load(batch)
        return [closure(), *(parameter.grad.clone() for parameter in model.parameters())]

    precision = Precision("fp32", CPU)
    shares = [gradients(SharedPass(Tokens(), model, precision, Place(rank, 3))) for rank in range(3)]
    whole = gradients(SharedPass(Tokens(), model, precision, Team()))
    assert shares[2][0] == 0
    for parts, expected in zip(zip(*shares, strict=True), whole, strict=True):
        torch.testing.assert_close(sum(parts) / 3, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("environment", "strategy", "sentence"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, None, "--strategy must be given where torchrun starts several processes"),
        ({}, "ddp", "torchrun --nproc-per-node N -m llqr train RECIPE --strategy ddp"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "dpp", "--strategy must be one of|Did you mean|ddp"),
    ],
)
def test_a_strategy_and_torchrun_need_each_other(monkeypatch, environment, strategy, sentence):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=sentence):
        launch.check(strategy)


def test_devices_and_shards_are_checked():
    with pytest.raises(ConfigurationError, match="--device must be auto, cpu or cuda with --strategy"):
        launch.own_device("cuda:1")
    assert launch.own_device("cpu") == "cpu"
    with pytest.raises(ConfigurationError, match="--shards needs --strategy"):
        launch.shard_count("all", None)
    with pytest.raises(ConfigurationError, match="--shards must be all or a whole number"):
        launch.shard_count("some", "ddp")
    assert [launch.shard_count(text, "ddp") for text in (None, "all", "2")] == [None, "all", 2]

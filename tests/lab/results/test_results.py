"""Files of results: what is kept of a run, and what is refused."""

import json

import pytest

from fake_runs import write_analysis, write_run
from llqr.lab.cli import app as cli
from llqr.lab.config.strict import ConfigurationError
from llqr.lab.errors import DataError
from llqr.lab.number_table import spread
from llqr.lab.results import measurements as results
from llqr.lab.runs.stored import find, read


def run_cli(*arguments):
    with pytest.raises(SystemExit) as end:
        cli.main([str(argument) for argument in arguments])
    return end.value.code


def test_a_line_holds_all_that_is_needed_to_judge_a_run(tmp_path):
    folder = write_run(tmp_path, "llqr-ngd", 3, best=91.5)
    write_analysis(folder, 4.0, 3.0)
    path = tmp_path / "kept.jsonl"
    assert results.add([read(folder)], path) == (1, 0)
    (line,) = path.read_text().splitlines()
    entry = json.loads(line)
    assert (entry["kind"], entry["recipe"], entry["seed"]) == ("run", "digits/mlp", 3)
    assert entry["run"]["geometry"]["structure"] == "e-kfac"
    assert entry["result"]["best"] == 91.5
    assert (entry["versions"]["torch"], entry["commit"], entry["dirty"]) == ("2.13.0", "0123abc", False)
    assert entry["machine"]["device"] == "cpu"
    assert entry["analysis"]["sharpness"]["top"]["value"] == 4.0
    (measurement,) = results.read(tmp_path)
    assert (measurement.method, measurement.seed, measurement.origin) == ("llqr-ngd", 3, "kept.jsonl, line 1")


def test_paths_of_the_machine_are_left_out(tmp_path):
    later = {"command": "llqr train digits/mlp --data-dir '/mnt/big disk/data'", "versions": {}, "machine": {}}
    entry = results.line_of(read(write_run(tmp_path, "sgdm", 0, config={"resumed": [later]})))
    assert entry["command"] == "llqr compare --data digits --model mlp --data-dir data --out=runs"
    assert "root" not in entry["run"]["data"]
    text = json.dumps(entry)
    assert not any(place in text for place in ("/home", "/scratch", "/mnt", str(tmp_path)))


@pytest.mark.parametrize(
    ("command", "kept"),
    [
        ("llqr train cifar100/resnet18@short", "llqr train cifar100/resnet18@short"),
        ("llqr train ./mine/own.toml --out ../runs", "llqr train ./mine/own.toml --out ../runs"),
        ("llqr train /home/me/own.toml --out /tmp/x/", "llqr train own.toml --out x"),
        ("llqr train a --set 'data.root=\"/srv/my data\"'", "llqr train a --set 'data.root=\"my data\"'"),
        ("llqr train a --data-dir '/mnt/big disk/data' --quiet", "llqr train a --data-dir data --quiet"),
    ],
)
def test_only_absolute_paths_are_cut(command, kept):
    assert results.without_places(command) == kept


def test_what_is_there_already_is_passed_over_and_another_result_refused(tmp_path):
    path = tmp_path / "kept.jsonl"
    write_run(tmp_path / "a", "sgdm", 0)
    write_run(tmp_path / "a", "sam", 0)
    assert results.add(find([tmp_path / "a"]), path) == (2, 0)
    text = path.read_text()
    assert results.add(find([tmp_path / "a"]), path) == (0, 2)
    write_run(tmp_path / "b", "sgdm", 0, best=50.0)
    with pytest.raises(ConfigurationError, match=r"kept\.jsonl, line 1 holds another result of digits/mlp sgdm seed 0"):
        results.add(find([tmp_path / "b"]), path)
    assert path.read_text() == text
    write_run(tmp_path / "c", "sgdm", 0, best=50.0, epochs=7)  # another experiment
    assert results.add(find([tmp_path / "c"]), path) == (1, 0)


def test_of_two_folders_with_the_same_run_one_is_kept(tmp_path):
    for folder in ("a", "b"):
        write_run(tmp_path / folder, "sgdm", 0)
    assert results.add(find([tmp_path]), tmp_path / "kept.jsonl") == (1, 1)
    write_run(tmp_path / "c", "sgdm", 0, best=50.0)
    with pytest.raises(ConfigurationError, match=r"a/.* holds another result of digits/mlp sgdm seed 0 than .*c/"):
        results.add(find([tmp_path]), tmp_path / "other.jsonl")


def test_a_file_that_was_edited_by_hand_may_end_without_a_newline(tmp_path):
    path = tmp_path / "kept.jsonl"
    write_run(tmp_path, "sgdm", 0)
    write_run(tmp_path, "sam", 0)
    first, second = find([tmp_path])
    results.add([first], path)
    path.write_text(path.read_text().rstrip("\n"))
    assert results.add([second], path) == (1, 0)
    assert [run.method for run in results.read_file(path)] == [first.method, second.method]


def test_the_command_adds_finished_runs_only(tmp_path, capsys):
    write_run(tmp_path / "runs", "sgdm", 0)
    write_run(tmp_path / "runs", "sgdm", 1, finished=False)
    to = tmp_path / "results/digits.jsonl"
    assert run_cli("results", "add", tmp_path / "runs", "--to", to) == 0
    assert capsys.readouterr().out == "1 added, 0 there already\n"
    assert len(to.read_text().splitlines()) == 1
    assert run_cli("results", "add", tmp_path / "runs/digits/mlp/sgdm/seed1", "--to", to) == 0
    assert capsys.readouterr().out == "0 added, 0 there already\n"
    assert run_cli("results", "add", tmp_path / "runs", "--to", tmp_path / "a.txt") == 2
    assert "--to must end in .jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(("line", "said"), [('{"kind": "ru', "is damaged"), ('{"a": 1}', "is no"), ("3", "is no")])
def test_damaged_lines_are_named(tmp_path, line, said):
    (tmp_path / "x.jsonl").write_text(f'{{"kind": "benchmark"}}\n{line}\n')
    with pytest.raises(DataError, match=rf"x\.jsonl, line 2 {said}"):
        results.read(tmp_path)


def test_lines_of_another_kind_and_empty_ones_are_passed_over(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"kind": "benchmark"}\n\n')
    assert results.read(tmp_path) == []


def test_configurations_differ_in_settings_and_not_in_where_the_data_are():
    one = {"data": {"name": "digits", "options": {}, "root": "a"}, "probe": None, "training": {"epochs": 3}}
    same = {"data": {"name": "digits", "root": "b"}, "training": {"epochs": 3, "extra": None}}
    assert results.differences(one, same) == []
    other = {"data": {"name": "digits"}, "probe": {"rho": 0.1}, "training": {"epochs": 4}}
    assert results.differences(one, other) == ["probe.rho = None, not 0.1", "training.epochs = 3, not 4"]


@pytest.mark.parametrize(
    ("theirs", "ours", "same"),
    [
        ({"norm": "metric"}, {"norm": None}, True),
        ({"norm": "metric"}, {"norm": "euclidean"}, True),
        ({"norm": "layer-metric"}, {"norm": "layer-euclidean"}, True),
        ({"norm": "layer-metric"}, {"norm": None}, False),
        ({"norm": "metric", "kind": "fishersam"}, {"norm": "euclidean", "kind": "fishersam"}, False),
    ],
)
def test_without_a_metric_the_norm_of_a_probe_is_the_euclidean_one(theirs, ours, same):
    one, other = ({"probe": {"kind": "sam", "rho": 0.1} | probe, "geometry": None} for probe in (theirs, ours))
    assert (results.differences(one, other) == []) == same
    if theirs["norm"] == "metric":
        with_metric = [run | {"geometry": {"divergence": "ngd"}} for run in (one, other)]
        assert results.differences(*with_metric)


@pytest.mark.parametrize(
    ("structure", "same"),
    [("diagonal", True), ("e-kfac", False), ({"*": "scalar"}, True), ({"a.*": "kfac", "*": "scalar"}, False)],
)
def test_the_longest_side_matters_to_structures_that_have_sides(structure, same):
    sides = [{"geometry": {"structure": structure, "runtime": {"max_side": side}}} for side in (8192, 4096)]
    assert (results.differences(*sides) == []) == same


@pytest.mark.parametrize(("value", "text"), [(0.0, "0.00"), (0.005, "0.005000"), (0.5, "0.5000"), (50.0, "50.00")])
def test_decimals_follow_the_size_of_a_number(value, text):
    assert spread(value) == text

"""Kept curves: what they hold, how a file grows, and what is refused."""

import json
from pathlib import Path

import pytest

from fake_runs import write_run
from llqr.lab import pictures, plots
from llqr.lab.cli import app as cli
from llqr.lab.results import curves

ROOT = Path(__file__).parents[3]


def results(*arguments):
    with pytest.raises(SystemExit) as end:
        cli.main(["results", *map(str, arguments)])
    return end.value.code


def keep(*arguments):
    return results("curve", *arguments)


def test_a_curve_has_every_evaluation_and_refresh_and_says_what_made_it(tmp_path, capsys):
    run = write_run(tmp_path / "runs", "llqr-ngd+sam", 1, finished=False)
    assert keep(run, "--to", tmp_path / "curves") == 0
    path = tmp_path / "curves/digits-mlp-seed1.jsonl"
    assert capsys.readouterr().out == f"{path}\n"
    (line,) = map(json.loads, path.read_text().splitlines())
    assert (line["kind"], line["run"]["method"], line["seed"], line["finished"]) == ("curve", "llqr-ngd+sam", 1, False)
    assert line["command"] == "llqr compare --data digits --model mlp --data-dir data --out=runs"
    assert line["commit"] == "0123abc"
    assert set(line["made_by"]) == {"command", "commit", "dirty"}
    assert (line["split"], line["epoch"], line["accuracy"], line["test_loss"]) == ("test", [1, 2], [87, 88], [2, 1])
    assert (line["train_loss"], line["train_seconds"]) == ([1, 0.5], [1, 1])
    assert (line["refresh_step"], line["refresh_seconds"]) == ([10, 20], [0.5, 0.5])
    assert (line["refresh_change"], line["refresh_cosine"]) == ([0.1, None], [0.9, 0.8])
    assert (line["objective_before"], line["objective_after"]) == ([-2, -2], [-3, None])
    assert str(tmp_path) not in path.read_text()


def test_a_longer_log_replaces_the_curve_of_its_run_and_no_other(tmp_path):
    to = tmp_path / "curves"
    write_run(tmp_path / "a", "sam", 0)
    write_run(tmp_path / "a", "llqr-ngd", 0, finished=False)
    assert keep(tmp_path / "a", "--to", to) == 0
    write_run(tmp_path / "b", "llqr-ngd", 0)
    assert keep(tmp_path / "b", "--to", to) == 0
    lines = [json.loads(line) for line in (to / "digits-mlp-seed0.jsonl").read_text().splitlines()]
    assert [(line["run"]["method"], line["epoch"][-1]) for line in lines] == [("llqr-ngd", 4), ("sam", 4)]
    assert "refresh_step" not in lines[1]


def test_bad_input_is_refused_in_one_sentence(tmp_path, capsys):
    run = write_run(tmp_path / "runs", "sam", 0)
    (tmp_path / "curves").mkdir()
    (tmp_path / "curves/digits-mlp-seed0.jsonl").write_text('{"kind": "run"}\n')
    assert keep(run, "--to", tmp_path / "curves") == 3
    assert "digits-mlp-seed0.jsonl, line 1 is no curve" in capsys.readouterr().err
    assert keep(run, "--to", run / "config.json") == 73
    assert "--to" in capsys.readouterr().err
    (run / "log.jsonl").write_text("")
    assert keep(run, "--to", tmp_path / "others") == 3
    assert "has no evaluation yet" in capsys.readouterr().err
    assert not (tmp_path / "others").exists()


def test_the_picture_has_every_run_and_says_which_ones_stopped(tmp_path, capsys):
    write_run(tmp_path / "runs", "sam", 0)
    write_run(tmp_path / "runs", "llqr-ngd", 0, finished=False)
    assert keep(tmp_path / "runs", "--to", tmp_path / "curves") == 0
    path = tmp_path / "curves/digits-mlp-seed0.jsonl"
    lines = list(curves.read(path).values())
    figure = plots.draw_curves(lines)
    accuracy, loss, change = figure.axes
    for axes, column in ((accuracy, "accuracy"), (loss, "train_loss")):
        assert [list(line.get_ydata()) for line in axes.get_lines()] == [line[column] for line in lines]
        assert [list(line.get_xdata()) for line in axes.get_lines()] == [line["epoch"] for line in lines]
    (changes,) = change.get_lines()
    (learned,) = (line for line in lines if line["run"]["method"] == "llqr-ngd")
    steps = learned["step"][-1] / learned["epoch"][-1]
    assert list(changes.get_xdata()) == [step / steps for step in learned["refresh_step"]]
    assert "llqr-ngd, seed 0, stopped at epoch 2" in figure.get_supxlabel()
    capsys.readouterr()
    assert results("draw", path, "--to", tmp_path / "x.svg", "--method", "sam") == 0
    assert capsys.readouterr().out == f"{tmp_path / 'x.svg'}\n"
    text = (tmp_path / "x.svg").read_text()
    assert pictures.digest(path) in text
    assert "llqr-ngd" not in text


def test_runs_with_other_settings_have_a_name_and_a_look_of_their_own(tmp_path):
    for epochs in (4, 6):
        write_run(tmp_path / f"{epochs}", "sam", 0, epochs=epochs)
    write_run(tmp_path / "4", "sam", 1)
    assert keep(tmp_path / "4", tmp_path / "6", "--to", tmp_path / "curves") == 0
    lines = [line for seed in (0, 1) for line in curves.read(tmp_path / f"curves/digits-mlp-seed{seed}.jsonl").values()]
    accuracy = plots.draw_curves(lines).axes[0]
    assert accuracy.get_legend_handles_labels()[1] == ["sam, training.epochs=4", "sam, training.epochs=6"]
    assert len({line.get_color() for line in accuracy.get_lines()}) == 2


def test_the_names_of_long_settings_stay_inside_the_picture(tmp_path):
    lines = []
    for bounds in ("[0.1, 10.0]", "[0.01, 100.0]"):
        run = {"method": "llqr-ngd", "bounds": bounds, "structure": f"e-kfac {bounds}", "damping": f"share of {bounds}"}
        columns = {"epoch": [1], "step": [10], "accuracy": [90.0], "train_loss": [0.1]}
        lines.append({"recipe": "mine", "seed": 0, "run": run, "finished": True, "split": "test"} | columns)
    figure = plots.draw_curves(lines)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1


def test_a_run_that_has_just_begun_keeps_no_other_from_being_kept(tmp_path, capsys):
    write_run(tmp_path / "runs", "sam", 0)
    begun = write_run(tmp_path / "runs", "sgdm", 0, finished=False)
    (begun / "log.jsonl").write_text("")
    assert keep(tmp_path / "runs", "--to", tmp_path / "curves") == 0
    assert capsys.readouterr().err == f"left out: {begun} has no evaluation yet\n"
    assert len(curves.read(tmp_path / "curves/digits-mlp-seed0.jsonl")) == 1


def test_what_cannot_be_drawn_is_refused(tmp_path, capsys):
    run = write_run(tmp_path / "runs", "sam", 0)
    keep(run, "--to", tmp_path / "curves")
    path = tmp_path / "curves/digits-mlp-seed0.jsonl"
    other = path.with_name("other.jsonl")
    other.write_text(path.read_text().replace('"accuracy"', '"bleu"'))
    for arguments, message in (
        ((path, "--to", tmp_path / "x.txt"), "--to must end in .svg, .png or .pdf"),
        ((path, "--to", tmp_path / "x.svg", "--method", "adam"), "--method must be one of sam, got 'adam'"),
        ((tmp_path / "none.jsonl", "--to", tmp_path / "x.svg"), "none.jsonl is not there"),
        ((tmp_path, "--to", tmp_path / "x.svg"), "is a folder; name the files in it"),
        ((path, other, "--to", tmp_path / "x.svg"), "evaluated by test accuracy and test bleu; draw them apart"),
    ):
        assert results("draw", *arguments) == 2
        assert message in capsys.readouterr().err
    path.write_text("")
    assert results("draw", path, "--to", tmp_path / "x.svg") == 2
    assert "FILES hold no curve" in capsys.readouterr().err


def test_the_picture_of_the_site_is_that_of_the_kept_curves():
    """If this fails, run `make figures`."""
    text = (ROOT / "docs/figures/cifar100-rho-0.1.svg").read_text()
    for file in sorted((ROOT / "results/curves").glob("cifar100-resnet18@rho-0.1-seed*.jsonl")):
        assert pictures.digest(file) in text

"""Kept curves: what they hold, how they are drawn, and what is refused."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest

from fake_runs import write_run
from llqr.lab import pictures, plots
from llqr.lab.cli import app as cli
from llqr.lab.results import measurements

ROOT = Path(__file__).parents[3]


def results(*arguments):
    with pytest.raises(SystemExit) as end:
        cli.main(["results", *map(str, arguments)])
    return end.value.code


def curve(method="sam", seed=0, epochs=4, finished=True, **changes):
    """A made-up run whose accuracy rises by one per epoch, with two refreshes if it learns a metric."""
    at = list(range(1, epochs + 1))
    line = {"kind": "curve", "recipe": "digits/mlp", "seed": seed, "run": {"method": method}, "finished": finished}
    line |= {"split": "test", "epoch": at, "step": [10 * epoch for epoch in at], "accuracy": [86 + one for one in at]}
    line |= {"train_loss": [1 / epoch for epoch in at]}
    line |= {"refresh_step": [10, 20], "refresh_change": [0.1, None]} if "llqr" in method else {}
    return line | changes


@pytest.fixture
def kept(tmp_path):
    def write(*lines, name="kept.jsonl"):
        (tmp_path / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return tmp_path / name

    return write


def test_a_curve_has_every_evaluation_and_refresh_and_a_longer_log_replaces_it(tmp_path, capsys):
    to = tmp_path / "kept/some.jsonl"
    write_run(tmp_path / "a", "sam", 1)
    write_run(tmp_path / "a", "llqr-ngd", 1, finished=False)
    assert results("add", tmp_path / "a", "--to", to) == 0
    path = tmp_path / "kept/curves/digits-mlp-seed1.jsonl"
    assert capsys.readouterr().out == "1 added, 0 there already\n"
    learned, sam = measurements.read_curves(path)
    assert (learned["run"]["method"], learned["seed"], learned["finished"]) == ("llqr-ngd", 1, False)
    assert learned["command"] == "llqr compare --data digits --model mlp --data-dir data --out=runs"
    assert learned["commit"] == "0123abc"
    assert (learned["split"], learned["epoch"], learned["accuracy"]) == ("test", [1, 2], [87, 88])
    assert (learned["test_loss"], learned["train_loss"], learned["train_seconds"]) == ([2, 1], [1, 0.5], [1, 1])
    assert (learned["refresh_step"], learned["refresh_seconds"]) == ([10, 20], [0.5, 0.5])
    assert (learned["refresh_change"], learned["refresh_cosine"]) == ([0.1, None], [0.9, 0.8])
    assert (learned["objective_before"], learned["objective_after"]) == ([-2, -2], [-3, None])
    assert (sam["finished"], "refresh_step" in sam) == (True, False)
    assert str(tmp_path) not in path.read_text()

    again = write_run(tmp_path / "b", "llqr-ngd", 1)
    for _ in range(2):
        assert results("add", tmp_path / "b", "--to", to) == 0
    lines = measurements.read_curves(path)
    assert [(line["run"]["method"], line["finished"]) for line in lines] == [("llqr-ngd", True), ("sam", True)]
    assert len(path.read_text().splitlines()) == 3
    for folder in ("c", "d"):  # one that was stopped elsewhere does not replace it; another seed is another run
        write_run(tmp_path / folder, "llqr-ngd", 1 + (folder == "d"), finished=False)
        assert results("add", tmp_path / folder, "--to", to) == 0
    everything = tmp_path / "everything.jsonl"
    everything.write_text("".join(file.read_text() for file in path.parent.iterdir()))
    lines = [(line["seed"], line["run"]["method"], line["finished"]) for line in measurements.read_curves(everything)]
    assert sorted(lines) == [(1, "llqr-ngd", True), (1, "sam", True), (2, "llqr-ngd", False)]

    path.write_bytes(b"\xff\n")
    assert results("add", tmp_path / "b", "--to", to) == 0
    (again / "log.jsonl").write_text("")
    assert results("add", tmp_path / "b", "--to", tmp_path / "others/some.jsonl") == 3
    assert not (tmp_path / "others").exists()


def test_the_picture_has_every_run_and_says_which_ones_stopped(tmp_path, kept, capsys):
    lines = [curve(), curve("llqr-ngd", epochs=2, finished=False)]
    path = kept(*lines)
    assert measurements.read_curves(path) == lines
    figure = plots.draw_curves(lines)
    accuracy, loss, change = figure.axes
    for axes, column in ((accuracy, "accuracy"), (loss, "train_loss")):
        assert [list(line.get_ydata()) for line in axes.get_lines()] == [line[column] for line in lines]
        assert [list(line.get_xdata()) for line in axes.get_lines()] == [line["epoch"] for line in lines]
    (changes,) = change.get_lines()
    assert list(changes.get_xdata()) == [1, 2]  # ten steps are an epoch
    assert "llqr-ngd, seed 0, stopped at epoch 2" in figure.get_supxlabel()
    assert results("draw", path, "--to", tmp_path / "x.svg", "--method", "sam") == 0
    assert capsys.readouterr().out == f"{tmp_path / 'x.svg'}\n"
    text = (tmp_path / "x.svg").read_text()
    assert pictures.digest(path) in text
    assert "llqr-ngd" not in text


def test_panels_show_what_is_asked_for(tmp_path, kept, capsys):
    line = curve()
    error, loss = plots.draw_curves([line], ["error:step", "train_loss:epoch"]).axes
    assert [list(axes.get_lines()[0].get_ydata()) for axes in (error, loss)] == [[13, 12, 11, 10], line["train_loss"]]
    assert list(error.get_lines()[0].get_xdata()) == [10, 20, 30, 40]
    assert list(loss.get_lines()[0].get_xdata()) == [1, 2, 3, 4]
    assert (error.get_ylabel(), loss.get_xlabel()) == ("test error", "epoch")
    path = kept(line)
    for panel, message in (
        ("bleu:step", "--panel must be one of"),
        ("accuracy:hours", "must be one of epoch, step"),
    ):
        assert results("draw", path, "--to", tmp_path / "x.svg", "--panel", panel) == 2
        assert message in capsys.readouterr().err
    learned = kept(curve("llqr-ngd"), name="learned.jsonl")
    other = kept({key.replace("accuracy", "bleu"): value for key, value in curve().items()}, name="other.jsonl")
    for file, panel in ((learned, "refresh_step:epoch"), (other, "error:epoch"), (path, "resumed:step")):
        assert results("draw", file, "--to", tmp_path / "x.svg", "--panel", panel) == 2
        assert "--panel must be one of refresh_change, epoch, step, " in capsys.readouterr().err


def test_a_late_and_sparse_probe_takes_no_time_before_it_starts(tmp_path):
    """And a second pass in one step of two then."""
    script = runpy.run_path(str(ROOT / "docs/figures/price.py"))
    rows = [{"method": "LLQR", "interval": 500, "lasting_vs_sam": {"median": 0.6}}]
    rows += [{"method": "LLQR+SAM", "interval": 500, "lasting_vs_sam": {"median": 1.2}}]
    (tmp_path / "times.json").write_text(json.dumps({"rows": rows}))
    time_of_sam = script["time_of_sam"]
    time_of_sam.__globals__["CADENCE"] = tmp_path / "times.json"
    run = {"geometry": {"every": 500}, "base": {"name": "sgd"}, "probe": {"start_after": 20, "every": 2}}
    assert time_of_sam(run, np.array([10, 20, 30, 40])).tolist() == pytest.approx([6, 12, 21, 30])


def test_runs_with_other_settings_have_a_name_and_a_look_of_their_own():
    lines = [curve(seed=seed, run={"method": "sam", "rho": rho}) for seed, rho in ((0, 0.1), (1, 0.1), (0, 0.2))]
    accuracy = plots.draw_curves(lines).axes[0]
    assert accuracy.get_legend_handles_labels()[1] == ["sam, rho=0.1", "sam, rho=0.2"]
    assert len({line.get_color() for line in accuracy.get_lines()}) == 2


def test_the_names_of_long_settings_stay_inside_the_picture():
    settings = [{"bounds": bounds, "structure": f"e-kfac {bounds}", "damping": f"share of {bounds}"} for bounds in "ab"]
    figure = plots.draw_curves([curve(run={"method": "sam", **own}) for own in settings])
    figure.draw_without_rendering()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1


def test_many_names_leave_room_for_the_panel():
    figure = plots.draw_curves([curve(run={"method": f"method {number}"}) for number in range(12)], ["accuracy:epoch"])
    figure.draw_without_rendering()
    ((legend,), (panel,)) = figure.legends, figure.axes
    assert panel.get_window_extent().height > figure.dpi  # an inch
    assert panel.get_window_extent().y1 < legend.get_window_extent().y0


def test_what_cannot_be_drawn_is_refused(tmp_path, kept, capsys):
    path = kept(curve())
    other = kept({key.replace("accuracy", "bleu"): value for key, value in curve().items()}, name="other.jsonl")
    for arguments, message in (
        ((path, "--to", tmp_path / "x.txt"), "--to must end in .svg, got"),
        ((path, "--to", tmp_path / "x.svg", "--method", "adam"), "--method must be one of sam, got 'adam'"),
        ((tmp_path, "--to", tmp_path / "x.svg"), "is no file"),
        (
            (path, other, "--to", tmp_path / "x.svg"),
            "digits/mlp test bleu; draw them apart",
        ),
        ((kept(name="empty.jsonl"), "--to", tmp_path / "x.svg"), "FILES hold no curve"),
    ):
        assert results("draw", *arguments) == 2
        assert message in capsys.readouterr().err
    assert results("draw", kept({"kind": "run"}), "--to", tmp_path / "x.svg") == 3
    assert "line 1 is no curve, but a run" in capsys.readouterr().err


def test_the_picture_of_the_site_is_that_of_the_kept_curves():
    """If this fails, run `make figures`."""
    curves = {"cifar100-rho-0.1": "cifar100-resnet18@rho-0.1", "cifar100-error-loss": "cifar100-resnet18@rho-0.1"}
    files = {name: list((ROOT / "results/curves").glob(f"{own}-seed*.jsonl")) for name, own in curves.items()}
    files["europarl"] = [ROOT / "results/curves/iwslt14-europarl-de-en-seed0.jsonl"]
    files["price"] = [ROOT / "results/cifar100.jsonl", ROOT / "results/price.jsonl"]
    for name, own in files.items():
        text = (ROOT / f"docs/figures/{name}.svg").read_text()
        assert own
        assert all(pictures.digest(file) in text for file in own), name

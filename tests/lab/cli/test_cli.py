"""The command line: what it prints, which exit code a script sees, and one sentence instead of a traceback."""

import itertools
import json
import shutil

import pytest
import torch

from llqr.lab.config import recipe

QUICK = ["--set", "training.epochs=2", "--set", "geometries.ngd.inner.steps=2", "--device", "cpu", "--quiet"]
TABLES = ("cifar10", "cifar100", "tinyimagenet", "fsam-synergy", "imagenet", "fishersam-ablation", "label-noise")
SEQUENCES = ("iwslt14",)


@pytest.fixture(autouse=True)
def _reports_without_plots(monkeypatch):
    """They take most of the time of a report, and are tested in report/test_report.py, also those of a comparison."""
    monkeypatch.setattr("llqr.lab.pictures.inline", lambda figure, title: "<svg></svg>")


def test_storage_prints_the_papers_numbers(llqr):
    code, out, _ = llqr("storage")
    row = next(line.split() for line in out.splitlines() if "ViT-B/16" in line)
    assert (code, row[:2], row[4], row[6]) == (0, ["ViT-B/16", "e-kfac"], "387,826,882", "1,809.67")


def test_recipes_are_listed(llqr):
    code, out, _ = llqr("recipes")
    assert (code, [line for line in out.splitlines() if not line.startswith(" ")]) == (0, recipe.names())


@pytest.mark.parametrize(
    ("table", "variant"),
    [
        ("label-noise", ""),
        ("iwslt14", "diagonal"),
        *(
            pytest.param(table, variant, marks=pytest.mark.slow)
            for table, variant in [*((table, "") for table in (*TABLES, *SEQUENCES)), ("cifar100", "diagonal")]
            if table != "label-noise"
        ),
    ],
)
def test_every_table_can_be_planned(llqr, tmp_path, table, variant):
    code, out, _ = llqr("reproduce", table, *(["--variant", variant] if variant else []), "--dry-run", "--json")
    assert code == 0
    planned = json.loads(out)
    labels = [f"{name}@{variant}" if variant else name for name in recipe.names() if name.partition("/")[0] == table]
    rows = {label: recipe.load(label) for label in labels}
    expected = [
        (name, seed, method) for name, one in rows.items() for seed in range(one.seeds) for method in one.columns
    ]
    assert [(one["recipe"], one["seed"], one["run"]["method"]) for one in planned] == expected
    for one in planned:
        assert ("metric_bytes" in one) == one["run"]["method"].startswith("llqr")
        if variant and one["run"]["geometry"] is not None:
            assert one["run"]["geometry"]["structure"] == "diagonal"
            assert one["metric_scalars"] == one["parameters"]
            assert one["metric_bytes"] == 4 * one["parameters"]
    assert not any(tmp_path.iterdir())


def test_a_dry_run_prints_the_resolved_configuration_and_the_metrics_memory(llqr):
    one_cell = ("reproduce", "label-noise", "--row", "0.6", "--methods", "llqr+sam", "--dry-run")
    code, out, _ = llqr(*one_cell)
    assert code == 0
    for line in ("data.options.label_noise = 0.6", "probe.rho = 0.2", "# metric: 41,520,781 numbers, 158.4 MiB"):
        assert line in out.splitlines()
    code, diagonal, _ = llqr(*one_cell, "--variant", "diagonal")
    assert (code, "# metric: 11,220,132 numbers, 42.8 MiB" in diagonal.splitlines()) == (0, True)
    assert "# 11,220,132 parameters, 78,200 steps, seeds 0, 1, 2" in out
    code, out, _ = llqr("train", "digits/mlp@short", "--method", "sam", "--set", "probes.sam.rho=0.3", "--dry-run")
    assert (code, "training.epochs = 5" in out, "probe.rho = 0.3" in out, "no metric" in out) == (0, True, True, True)
    code, out, _ = llqr(
        "compare", "digits/mlp-noisy", "--set", "model.name=cnn", "--dry-run", "--data-dir", "some where"
    )
    assert (code, "model.name = 'cnn'" in out, "data.root = 'some where'" in out) == (0, True, True)


def test_what_is_named_twice_is_made_once(llqr):
    twice = ("reproduce", "digits", "--row", "mlp", "--row", "mlp", "--methods", "sgdm,sam", "--seeds", "1")
    code, out, _ = llqr(*twice, "--dry-run", "--json")
    assert (code, [one["run"]["method"] for one in json.loads(out)]) == (0, ["sgdm", "sam"])
    sweep = ("--sweep", "probes.sam.rho=0.1,0.2, 0.1", "--set", "data.options.validation=200")
    code, out, _ = llqr("compare", "digits/mlp", "--methods", "sam", "--seeds", "1", *sweep, "--dry-run", "--json")
    assert (code, [one["run"]["probe"]["rho"] for one in json.loads(out)]) == (0, [0.1, 0.2])


def test_a_method_that_a_sweep_does_not_change_is_run_once(llqr, tmp_path):
    sweep = ("--sweep", "probes.sam.rho=0.1,0.2", "--set", "data.options.validation=200", "--methods", "sgdm,sam")
    code, out, err = llqr("compare", "digits/mlp", *sweep, "--seeds", "2", *QUICK, "--keep", "a.jsonl")
    assert (code, "a.jsonl: 6 added, 0 there already" in err) == (0, True)
    assert "sgdm: of 1, digits/mlp probes.sam.rho=0.1 has the best last" in out
    assert "sam: of 2, digits/mlp probes.sam.rho=0." in out
    assert len(list(tmp_path.glob("runs/*/digits/mlp/sgdm/*/result.json"))) == 2


def test_a_variant_is_made_of_the_rows_that_have_it(llqr):
    code, out, _ = llqr("reproduce", "cifar100", "--variant", "rho-0.1", "--methods", "sam", "--dry-run", "--json")
    assert (code, {one["recipe"] for one in json.loads(out)}) == (0, {"cifar100/resnet18@rho-0.1"})
    for asked in (["--variant", "rho-1"], ["--variant", "rho-0.1", "--row", "vgg16-bn"]):
        code, _, err = llqr("reproduce", "cifar100", *asked, "--dry-run")
        assert (code, ": variant must be one of short, " in err) == (2, True)


def test_a_dry_run_says_what_sizes_are_assumed_before_a_text_is_prepared(llqr):
    code, out, _ = llqr("reproduce", "iwslt14", "--row", "europarl-de-en", "--methods", "llqr", "--dry-run")
    assert code == 0
    assert "# europarl-de-en is not prepared yet: sizes are those for 10,000 tokens" in out
    assert "base.betas = [0.9, 0.98]" in out
    assert "# too large, and stored as e-kfac-one-sided: source_embedding.weight (10000, 512)" in out


def test_compare_prints_a_row_per_method_and_leaves_the_runs(llqr, tmp_path):
    arguments = ("compare", "digits/mlp", "--methods", "sgdm,llqr+sam", "--seeds", "2", *QUICK)
    code, out, _ = llqr(*arguments, "--out", "runs/demo", "--json")
    assert code == 0
    printed = json.loads(out)
    first, second = printed["summaries"]
    assert (first["method"], second["method"]) == ("sgdm", "llqr-ngd+sam")
    assert (first["n"], first["relative_time"]) == (2, 1.0)
    best = []
    for seed in (0, 1):
        folder = tmp_path / "runs/demo/digits/mlp/llqr-ngd+sam" / f"seed{seed}"
        best.append(json.loads((folder / "result.json").read_text())["best"])
        config = json.loads((folder / "config.json").read_text())
        assert (config["seed"], config["run"]["training"]["epochs"]) == (seed, 2)
        assert (config["versions"]["torch"], config["machine"]["device"]) == (torch.__version__, "cpu")
        assert torch.load(folder / "checkpoint.pt", weights_only=True)["batches"]["epoch"] == 2
    assert second["best_mean"] == pytest.approx(sum(best) / 2)
    assert second["best_std"] == pytest.approx(abs(best[0] - best[1]) / 2**0.5)
    code, out, _ = llqr(*arguments, "--out", "runs/demo")
    assert code == 0
    assert f"{second['best_mean']:.2f} ± {second['best_std']:.2f}" in out
    assert f"{second['relative_time']:.2f}x" in out


def test_one_command_leads_from_a_recipe_to_a_row_of_the_table(llqr, tmp_path):
    arguments = ("reproduce", "digits", "--row", "mlp", "--methods", "sgdm", "--seeds", "1", "--device", "cpu")
    code, out, err = llqr(*arguments, "--quiet", "--keep", "results/digits.jsonl")
    assert code == 0
    assert err.endswith("results/digits.jsonl: 1 added, 0 there already\n")
    (line,) = (tmp_path / "results/digits.jsonl").read_text().splitlines()
    kept = json.loads(line)
    assert (kept["recipe"], kept["seed"]) == ("digits/mlp", 0)
    assert f"{kept['result']['best']:.2f}" in out
    assert "digits: accuracy" in out  # the table, of which one cell is measured
    assert "3 of 4 cells are missing." in out
    shutil.rmtree(tmp_path / "runs")
    code, again, err = llqr(*arguments, "--quiet", "--keep", "results/others.jsonl")
    assert (code, "1 of 1 runs are in results already" in err, (tmp_path / "runs").exists()) == (0, True, False)
    assert again
    assert out.endswith(again)  # the table
    two = ("--seeds", "2", "--keep", "results/digits.jsonl", "--dry-run")
    code, out, _ = llqr("reproduce", "digits", "--row", "mlp", "--methods", "sgdm", *two)
    assert (code, "runs/digits/mlp/sgdm/seed1" in out) == (0, True)


def test_train_and_compare_keep_their_runs_too(llqr, tmp_path):
    assert llqr("train", "digits/mlp", "--method", "sam", *QUICK, "--keep", "a.jsonl")[0] == 0
    assert llqr("compare", "digits/mlp", "--methods", "sgdm,sam", "--seeds", "1", *QUICK, "--keep", "a.jsonl")[0] == 0
    kept = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [one["run"]["method"] for one in kept] == ["sam", "sgdm"]
    assert len((tmp_path / "curves/digits-mlp-seed0.jsonl").read_text().splitlines()) == 2
    assert llqr("train", "digits/mlp", *QUICK, "--keep", "a.txt")[2] == "llqr: --keep must end in .jsonl, got a.txt.\n"


@pytest.mark.parametrize("command", [("compare", "digits/mlp"), ("reproduce", "digits", "--row", "mlp")])
def test_runs_before_one_that_diverges_are_kept(llqr, tmp_path, command):
    diverging = ("--methods", "sgdm,adam", "--seeds", "1", "--set", "bases.adam.lr=1e30", *QUICK)
    code, out, err = llqr(*command, *diverging, "--keep", "a.jsonl")
    assert (code, "a.jsonl: 1 added, 0 there already" in err) == (4, True)
    if command[0] == "compare":
        assert "sgdm" in out
        assert (tmp_path / "runs/report.html").exists()
    assert json.loads((tmp_path / "a.jsonl").read_text())["run"]["method"] == "sgdm"


def test_a_run_and_its_kept_line_name_the_commit_of_every_command(llqr, tmp_path, monkeypatch):
    monkeypatch.setattr("llqr.lab.stop.time.monotonic", itertools.count().__next__)
    monkeypatch.setenv("LLQR_COMMIT", "0123abc")
    arguments = ("train", "digits/mlp", *QUICK, "--keep", "a.jsonl")
    assert llqr(*arguments, "--max-minutes", "0.25")[0] == 75
    assert not (tmp_path / "a.jsonl").exists()
    monkeypatch.setenv("LLQR_COMMIT", "4567def-dirty")
    assert llqr(*arguments)[0] == 0
    config = json.loads((tmp_path / "runs/digits/mlp/sgdm/seed0/config.json").read_text())
    kept = json.loads((tmp_path / "a.jsonl").read_text())
    for one in (config, kept):
        (later,) = one["resumed"]
        assert (one["commit"], one["dirty"], later["commit"], later["dirty"]) == ("0123abc", False, "4567def", True)


def test_the_time_limit_stops_with_exit_code_75_and_the_same_command_resumes(llqr, tmp_path, monkeypatch):
    # A clock that goes a second further each time it is looked at.
    monkeypatch.setattr("llqr.lab.stop.time.monotonic", itertools.count().__next__)
    arguments = ("train", "digits/mlp", *QUICK)
    code, _, err = llqr(*arguments, "--max-minutes", "0.25")
    assert (code, "the limit of 0.25 minutes" in err, "Traceback" in err) == (75, True, False)
    folder = tmp_path / "runs/digits/mlp/sgdm/seed0"
    assert 0 < torch.load(folder / "checkpoint.pt", weights_only=True)["batches"]["position"] < 23
    code, out, _ = llqr(*arguments)
    assert (code, "sgdm" in out) == (0, True)
    assert len((folder / "log.jsonl").read_text().splitlines()) == 2
    assert llqr("train", "digits/mlp", *QUICK, "--method", "sam", "--max-minutes", "0")[0] == 75


def test_compare_puts_several_recipes_on_one_page(llqr, tmp_path):
    names = ("digits/mlp-noisy", "digits/mlp-clean")
    code, out, _ = llqr("compare", *names, "--methods", "sgdm", "--seeds", "1", *QUICK)
    assert code == 0
    page = (tmp_path / "runs/report.html").read_text()
    for name in names:
        assert name in out
        assert f"<small>{name}</small>" in page


def test_a_recipe_may_be_a_file(llqr, tmp_path):
    (tmp_path / "mine.toml").write_text('extends = "digits/mlp"\ntitle = "Mine"\n[training]\nepochs = 1\n')
    code, _, _ = llqr("train", "mine.toml", "--device", "cpu", "--quiet")
    assert code == 0
    assert json.loads((tmp_path / "runs/mine/sgdm/seed0/result.json").read_text())["title"] == "Mine"


def test_tensorboard_gets_the_logged_numbers(llqr, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    code, _, _ = llqr("train", "digits/mlp", "--method", "llqr", *QUICK, "--tensorboard")
    assert code == 0
    folder = tmp_path / "runs/digits/mlp/llqr-ngd/seed0"
    events = accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    logged = [record["test"]["accuracy"] for record in records]
    assert [event.value for event in events.Scalars("test/accuracy")] == pytest.approx(logged)
    reports = [report for record in records for report in record["refreshes"]]
    assert reports
    for key in ("change", "cosine"):
        found = events.Scalars(f"refresh/{key}")
        assert [event.step for event in found] == [report["step"] for report in reports]
        assert [event.value for event in found] == pytest.approx([report[key] for report in reports])


@pytest.mark.parametrize(
    ("code", "sentence", "arguments"),
    [
        (2, "--seed", ["train", "digits/mlp", "--seed", "x"]),
        (2, "less than or equal to 18446744073709551615", ["train", "digits/mlp", "--seed", str(2**64)]),
        (2, "recipe must be", ["train", "digits/nothing"]),
        (2, "got 'digits/mlp-noisey'; did you mean digits/mlp-noisy?", ["train", "digits/mlp-noisey@short"]),
        (2, "no such file", ["train", "missing.toml"]),
        (2, "--method must be one of sgdm", ["train", "digits/mlp", "--method", "sgd"]),
        (2, "--methods must be one of sgdm", ["compare", "digits/mlp", "--methods", "sam,sgd"]),
        (2, "--methods must name", ["compare", "digits/mlp", "--methods", ","]),
        (2, "digits/mlp: unknown key training.epoch", ["train", "digits/mlp", "--set", "training.epoch=3"]),
        (2, "model must be one of mlp", ["compare", "digits/mlp", "--set", "model.name=cnm"]),
        (2, "Missing argument 'RECIPE...'", ["compare"]),
        (2, "TABLE must be one of", ["reproduce", "imagnet"]),
        (2, "--row must be one of 0.2", ["reproduce", "label-noise", "--row", "0.5"]),
        (2, "variant must be one of short", ["reproduce", "cifar10", "--variant", "long"]),
        (2, "--device must be", ["train", "digits/mlp", "--device", "abacus"]),
        (2, "--capture needs a CUDA device", ["train", "digits/mlp", "--device", "cpu", "--capture"]),
        (2, "--max-minutes", ["train", "digits/mlp", "--max-minutes", "-1"]),
        (3, "CIFAR-10 was not found", ["train", "cifar10/resnet18", "--data-dir", "nowhere", "--device", "cpu"]),
        (3, "imagenet", ["train", "imagenet/resnet50", "--device", "cpu"]),
        (3, "llqr data iwslt14", ["train", "iwslt14/transformer_iwslt_de_en", "--device", "cpu"]),
        (4, "the training loss of epoch 1", ["train", "digits/mlp", "--device", "cpu", "--set", "bases.sgdm.lr=1e12"]),
    ],
)
def test_what_goes_wrong_is_one_sentence_and_an_exit_code(llqr, code, sentence, arguments):
    found, out, err = llqr(*arguments)
    assert found == code
    assert sentence in err
    assert "Traceback" not in err
    assert not out


def test_a_damaged_run_file_is_named(llqr, tmp_path):
    assert llqr("train", "digits/mlp", *QUICK)[0] == 0
    folder = tmp_path / "runs/digits/mlp/sgdm/seed0"
    (folder / "result.json").write_text("{")
    code, _, err = llqr("train", "digits/mlp", *QUICK)
    assert (code, "result.json is damaged" in err) == (3, True)
    shutil.copy(folder / "log.jsonl", folder / "checkpoint.pt")
    (folder / "result.json").unlink()
    code, _, err = llqr("train", "digits/mlp", *QUICK)
    assert (code, "checkpoint.pt is not a readable checkpoint" in err) == (3, True)


def test_a_sweep_chooses_by_the_last_evaluation_on_held_out_images(llqr, tmp_path):
    held_out = ("--set", "data.options.validation=200")
    arguments = (
        "compare",
        "digits/mlp",
        "--methods",
        "sgdm",
        "--seeds",
        "1",
        *QUICK,
        "--sweep",
        "bases.sgdm.lr=1e-6,0.1",
    )
    code, _, err = llqr(*arguments)
    assert (code, "--sweep chooses by data held out of the training set: give data.options.validation" in err) == (
        2,
        True,
    )
    code, out, _ = llqr(*arguments, *held_out)
    assert code == 0
    results = [
        json.loads((tmp_path / f"runs/bases.sgdm.lr={lr}/digits/mlp/sgdm/seed0/result.json").read_text())
        for lr in ("1e-6", "0.1")
    ]
    assert {result["split"] for result in results} == {"valid"}
    assert results[0]["last"] < results[1]["last"]
    chosen = "sgdm: of 2, digits/mlp bases.sgdm.lr=0.1 has the best last validation accuracy"
    assert f"{chosen}, {results[1]['last']:.2f} (n = 1)." in out.splitlines()
    assert (tmp_path / "runs/report.html").exists()
    shutil.rmtree(tmp_path / "runs/bases.sgdm.lr=1e-6")
    worse = (*arguments[:-1], "bases.sgdm.lr=1e12,1e-6,0.1", *held_out)
    code, out, err = llqr(*worse)  # the first value diverges, the second is run, and the third is done
    assert (code, chosen in out) == (4, True)
    assert err.splitlines()[-1].startswith("llqr: digits/mlp bases.sgdm.lr=1e12 sgdm seed 0: the training loss")
    two = ("compare", "digits/mlp-noisy", "digits/mlp-clean", *arguments[2:], *held_out)
    code, out, _ = llqr(*two)
    sentences = [line.partition(" bases")[0] for line in out.splitlines() if line.startswith("sgdm: of ")]
    assert (code, sentences) == (0, ["sgdm: of 2, digits/mlp-noisy", "sgdm: of 2, digits/mlp-clean"])
    for wrong in ("rho", "rho=", "=1", "probes.sam.rho=0.1,,0.2"):
        code, _, err = llqr("compare", "digits/mlp", *QUICK, "--sweep", wrong)
        assert (code, "--sweep must be KEY=VALUE,VALUE,..." in err) == (2, True)

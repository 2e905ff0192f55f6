"""Results that cannot be written: found before anything is trained or measured, one sentence, exit code 73."""

import resource

import pytest

QUICK = ["--device", "cpu", "--quiet", "--set", "training.epochs=1"]
BENCH = ["bench", "peers", "--device", "cpu", "--batch", "2", "--model", "mlp:image_size=8", "--repeats", "1"]
COMMANDS = {
    "--out: file/runs cannot be written: Not a directory.": ["train", "digits/mlp", *QUICK, "--out", "file/runs"],
    "--out: file cannot be written: Not a directory.": ["compare", "digits/mlp", *QUICK, "--out", "file"],
    "--keep: file cannot be written: Not a directory.": ["train", "digits/mlp", *QUICK, "--keep", "file/x.jsonl"],
    "--out: file cannot be written: Not a directory.\n": [*BENCH, "--out", "file/numbers.json"],
    "--out: file/toy cannot": ["toy", "hover", "--out", "file/toy"],
}


@pytest.fixture
def measured_nothing(monkeypatch):
    """Any work is an error."""
    for place in (
        "llqr.lab.training.carry_out.Training",
        "llqr.lab.bench.workload.Workload.__init__",
        "llqr.lab.toy.hover.simulate",
        "llqr.lab.analysis.solution.analyse",
    ):
        monkeypatch.setattr(place, None)


@pytest.mark.parametrize("sentence", COMMANDS)
def test_a_place_that_cannot_be_written_is_found_first(llqr, tmp_path, measured_nothing, sentence):
    (tmp_path / "file").write_text("")
    code, out, err = llqr(*COMMANDS[sentence])
    assert (code, out) == (73, "")
    assert err.startswith(f"llqr: {sentence}")
    assert err.count("\n") == 1


def test_commands_on_runs_check_their_files_first(llqr, tmp_path, monkeypatch):
    assert llqr("train", "digits/mlp", *QUICK)[0] == 0
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("llqr.lab.analysis.solution.analyse", None)
    for arguments in (["report", "runs", "--out", "file/x.html"], ["results", "add", "runs", "--to", "file/x.jsonl"]):
        code, out, err = llqr(*arguments)
        assert (code, out, err.count("\n"), "cannot be written: Not a directory" in err) == (73, "", 1, True)
    monkeypatch.setattr("llqr.lab.cli.report.check_folder", _read_only)
    assert llqr("report", "runs")[0] == 73


def _read_only(option, folder):
    from llqr.lab.errors import CannotWrite

    raise CannotWrite(f"{option}: {folder}")


def test_a_disk_that_fills_up_during_a_run_is_one_sentence(llqr, tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        code, out, err = llqr("train", "digits/mlp", *QUICK)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (code, out) == (73, "")
    assert err == "llqr: runs/digits/mlp/sgdm/seed0/checkpoint.pt cannot be written: File too large.\n"
    assert llqr("train", "digits/mlp", *QUICK)[0] == 0

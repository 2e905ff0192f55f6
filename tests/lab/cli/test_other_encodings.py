"""Files that are not in UTF-8 are named in one sentence."""

from pathlib import Path


def test_a_recipe(llqr):
    Path("mine.toml").write_bytes(b'title = "caf\xe9"\n')
    code, _, err = llqr("train", "mine.toml", "--dry-run")
    assert (code, err.startswith("llqr: mine.toml: 'utf-8' codec can't decode"), err.count("\n")) == (2, True, 1)


def test_a_recipe_from_an_editor_on_windows(llqr):
    Path("mine.toml").write_bytes(b'\xef\xbb\xbfextends = "digits/mlp"\r\ntitle = "Mine"\r\n')
    code, out, _ = llqr("train", "mine.toml", "--dry-run")
    assert (code, out.splitlines()[0]) == (0, "# mine: Mine")


def test_a_file_of_results(llqr):
    Path("results").mkdir()
    Path("results/mine.jsonl").write_bytes(b'{"kind": "run", "title": "caf\xe9"}\n')
    code, _, err = llqr("table", "digits")
    assert (code, err.startswith("llqr: mine.jsonl, line 1 is damaged: "), err.count("\n")) == (3, True, 1)
